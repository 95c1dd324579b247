"""KVPP asked for and not possible is an error of one sentence; not asked for, it changes nothing."""

import pytest

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.checks import HOOK_OPS, INDEXER_OP
from kvpp_vllm.config_seams import CONFIG_SEAMS, NCCL_SEAMS
from kvpp_vllm.seams import CPU_SEAMS, GPU_SEAMS, Seam, check_seams

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def test_asked_for_it_replaces_the_worker_class(cases):
    assert cases["on"] == "kvpp_vllm.worker_cpu.KvppCPUWorker"


@pytest.mark.parametrize(
    "case",
    [
        "sliding window off",
        "sparse",
        "mtp",
        "layout LBNHC",
        "compiled, no graphs",
        "PIECEWISE",
        "own split",
        "sparse compiled",
        "sparse PIECEWISE",
        "sparse own split",
        "breakable eager",
    ],
)
def test_what_goes_together_with_it_is_not_refused(cases, case):
    assert cases[case] == "kvpp_vllm.worker_cpu.KvppCPUWorker"


def test_compiled_pieces_of_a_sparse_model_end_at_the_indexers_operator(cases):
    assert cases["sparse pieces end at"].split() == [*HOOK_OPS, INDEXER_OP]


@pytest.mark.parametrize("case", ["off", "false"])
def test_not_asked_for_it_leaves_the_worker_class(cases, case):
    assert cases[case] == CPU_WORKER


def test_one_rank_is_a_warning_and_changes_nothing(cases, refusals_run):
    assert "UniProc" not in cases["tp1"]
    assert cases["tp1"] == CPU_WORKER
    warning = "KVPP was asked for at tensor parallel size 1"
    assert warning in refusals_run.stdout + refusals_run.stderr


def test_the_worker_of_vllm_ascend_is_extended(cases):
    assert cases["ascend"] == "kvpp_vllm.ascend.worker.KvppNPUWorker"


def test_a_vllm_ascend_with_its_own_kvpp_acts_and_the_plugin_says_so(cases, refusals_run):
    assert cases["ascend with kvpp"] == "vllm_ascend.worker.worker.NPUWorker"
    sentence = "The installed vllm-ascend has a KVPP of its own, which acts on enable_kvpp; this plugin "
    assert (refusals_run.stdout + refusals_run.stderr).count(sentence) == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not mla", "does not use MLA"),
        ("unknown key", "unknown setting 'trace_dri'; the settings are trace_dir"),
        ("not a boolean", "enable_kvpp is 'yes'; expected true or false"),
        ("not an object", "kvpp is 3; expected an object"),
        ("relative trace_dir", "expected an absolute path"),
        ("bad timeout", "kvpp.timeout_s is -1"),
        ("hybrid", "is hybrid"),
        ("sliding window", "--disable-sliding-window"),
        ("connector", "KV connectors (ExampleConnector)"),
        ("prefill side", "drop --kv-transfer-config"),
        ("decode side", "drop --kv-transfer-config"),
        ("offloading", "drop --kv-transfer-config and --kv-offloading-size"),
        ("layout BLHNC", "unset VLLM_KV_CACHE_LAYOUT"),
        ("layout BLNHC", "unset VLLM_KV_CACHE_LAYOUT"),
        ("layout BHLNC", "unset VLLM_KV_CACHE_LAYOUT"),
        ("dcp", "drop --decode-context-parallel-size"),
        ("pcp", "drop --prefill-context-parallel-size"),
        ("dbo", "drop --enable-dbo and --ubatch-size"),
        ("ubatch", "drop --enable-dbo and --ubatch-size"),
        ("dynamic mtp", "drop num_speculative_tokens_per_batch_size from --speculative-config"),
        ("ngram", "'ngram' is not supported, only MTP"),
        ("draft model", "'draft_model' is not supported, only MTP"),
        ("custom drafts", "'custom_class' is not supported, only MTP"),
        ("method suffix", "'suffix' is not supported, only MTP"),
        ("method ngram_gpu", "'ngram_gpu' is not supported, only MTP"),
        ("method eagle", "'eagle' is not supported, only MTP"),
        ("method eagle3", "'eagle3' is not supported, only MTP"),
        ("method medusa", "'medusa' is not supported, only MTP"),
        ("method mlp_speculator", "'mlp_speculator' is not supported, only MTP"),
        ("method dflash", "'dflash' is not supported, only MTP"),
        ("method dspark", "'dspark' is not supported, only MTP"),
        ("method extract_hidden_states", "'extract_hidden_states' is not supported, only MTP"),
        ("default graphs", "cudagraph_mode FULL_AND_PIECEWISE"),
        ("FULL", "set cudagraph_mode to PIECEWISE in --compilation-config, or add --enforce-eager"),
        ("FULL_DECODE_ONLY", "cudagraph_mode FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", "cudagraph_mode FULL_AND_PIECEWISE"),
        ("FULL uncompiled", "cudagraph_mode FULL replays"),
        ("breakable", "set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or add --enforce-eager"),
        ("partition", "set use_inductor_graph_partition to false in --compilation-config"),
        ("update swallowed", "splitting_ops lacks vllm::unified_mla_kv_cache_update"),
        ("attention swallowed", "splitting_ops lacks vllm::unified_mla_attention_with_output"),
        ("sparse update swallowed", "splitting_ops lacks vllm::unified_mla_kv_cache_update"),
        (
            "sparse PIECEWISE on cuda",
            "fused kernels on this platform write both caches inside a captured",
        ),
        ("sparse PIECEWISE on rocm", "(cudagraph_mode PIECEWISE); add --enforce-eager"),
        ("sparse default graphs", "VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
        ("other worker", "the worker class is " + CPU_WORKER),
    ],
)
def test_refused_in_one_sentence_that_names_the_setting(cases, case, words):
    message = cases[case]
    assert message.startswith("NotActiveError: KVPP was asked for and cannot be active: ")
    assert words in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    "seams", [CONFIG_SEAMS, NCCL_SEAMS, CPU_SEAMS, GPU_SEAMS], ids=["settings", "NCCL", "CPU", "GPU"]
)
def test_the_installed_vllm_has_every_seam(seams):
    check_seams(seams)


@pytest.mark.parametrize(
    "changed",
    [
        Seam(module="vllm.no_such_module", attribute="anything", use="a test"),
        Seam(module="vllm.config", attribute="VllmConfig.no_such_method", use="a test"),
        Seam(module="vllm.config", attribute="VllmConfig", fields=("no_such_field",), use="a test"),
        Seam(
            module="vllm.v1.worker.gpu_worker",
            attribute="Worker.execute_model",
            parameters=("scheduler_output", "another"),
            use="a test",
        ),
    ],
)
def test_a_missing_or_changed_seam_is_an_error_that_names_it(changed):
    with pytest.raises(NotActiveError, match=rf"{changed.module}\.{changed.attribute}"):
        check_seams((*GPU_SEAMS, changed))
