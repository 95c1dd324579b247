"""A stand-in for Triton's CPU backend, with which Model Runner V2 runs on a CPU in tests.

Model Runner V2 needs Triton, and a CPU build of vLLM takes Triton to be there only with a backend named "cpu". No such
backend is released. Under Triton's interpreter kernels run as Python, so none is needed either: the two classes here
are there to be found, and nothing calls them.
"""

from pathlib import Path


def model_runner_v2(directory: Path) -> dict[str, str]:
    """Write the stand-in's entry point to `directory`, and return the environment that runs vLLM on Model Runner V2.

    As an entry point it reaches spawned workers, and is there when vLLM is imported. Keep it out of the environment of
    everything else: it makes Model Runner V2 the default, and without the interpreter that crashes.
    """
    info = directory / "kvpp_triton_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpp-triton-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
    return {
        "PYTHONPATH": str(directory),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
