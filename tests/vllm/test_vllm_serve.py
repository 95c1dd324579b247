"""`vllm serve` with KVPP as its own process, over HTTP."""

import pytest

from kvpp_vllm.demo.checkpoint import build_tokenizer
from tests.support.serve import serve
from tests.support.vllm_cpu import EngineSpec
from tests.vllm.test_vllm_tokens import finished

SENTENCE = "the quick brown fox jumps over the lazy dog; "
PROMPTS = [SENTENCE, 3 * SENTENCE]
TOKENS = 12


@pytest.fixture(scope="module")
def texts_without_kvpp(checkpoint) -> list[str]:
    tokenizer = build_tokenizer()
    rounds = [[tokenizer.encode(prompt).ids] for prompt in PROMPTS]
    result = finished(EngineSpec(model=checkpoint, rounds=rounds, max_tokens=TOKENS))
    return [tokenizer.decode(tokens) for (tokens,) in result.tokens]


def test_the_server_answers_completions_as_without_kvpp(checkpoint, tmp_path, texts_without_kvpp):
    arguments = ["--additional-config", '{"enable_kvpp": true}']
    with serve(checkpoint, tmp_path / "serve.log", arguments=arguments) as server:
        answers = [server.complete(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        log = server.log.read_text()
    assert log.count("blocks with KVPP") == 2
    assert all(answer["usage"]["completion_tokens"] == TOKENS for answer in answers)
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == texts_without_kvpp
    assert texts[0] != texts[1]
