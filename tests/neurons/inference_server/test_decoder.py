"""Compiled steps of the decoder, with a counting and with a failing compiler."""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

PROMPT = list(range(7, 60, 5))


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from neurons.inference_server.sample import SMALL

    torch.set_num_threads(1)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).eval()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.nightly
def test_steps_are_compiled_once_with_the_same_results(model: Any) -> None:
    from neurons.inference_server.model import BUCKET, Decoder

    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    plain, compiled = Decoder(model), Decoder(model, compiler=counting)
    assert len(graphs) == 1  # before any request
    for new in (9, BUCKET, 2 * BUCKET):
        expected = plain.generate(PROMPT, new, capture_at=new)
        actual = compiled.generate(PROMPT, new, capture_at=new)
        assert actual.tokens == expected.tokens
        assert actual.captured == pytest.approx(expected.captured, abs=1e-5)
    assert len(graphs) == 1


def test_a_failing_compiler_is_reported_and_not_used(model: Any) -> None:
    from neurons.inference_server.model import Decoder

    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C compiler here\nand more lines")

    with capture_logs() as logs:
        decoder = Decoder(model, compiler=failing)
    (line,) = [one for one in logs if one["log_level"] == "warning"]
    assert "not compiled" in line["event"]
    assert "no C compiler here" in line["cause"]
    assert "INFERENCE_COMPILE=false" in line["remedy"]
    assert decoder.generate(PROMPT, 9).tokens == Decoder(model).generate(PROMPT, 9).tokens


@pytest.mark.parametrize(("window", "longest"), [(300, 256), (520, 512), (1000, 768), (None, 1000)])
def test_a_sliding_window_limits_the_positions(window: int | None, longest: int) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    from neurons.inference_server.model import Decoder
    from neurons.inference_server.sample import SMALL

    sizes = SMALL | {"max_position_embeddings": 1000}
    loader: Any = AutoModelForCausalLM
    decoder = Decoder(loader.from_config(MistralConfig(**sizes, sliding_window=window)).eval())
    assert (decoder.longest, len(decoder.generate([1] * (longest - 3), 3).tokens)) == (longest, 3)


@pytest.mark.parametrize("kind", ["lfm2", "minimax", "recurrent_gemma"])
def test_a_model_with_its_own_cache_gives_the_logits_of_a_pass_without_one(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from neurons.inference_server.model import Decoder
    from neurons.inference_server.sample import SMALL

    torch.set_num_threads(1)
    torch.manual_seed(3)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(AutoConfig.for_model(kind, **SMALL | HYBRID[kind])).eval()
    model.generation_config.repetition_penalty = 9.0  # of the model's folder; greedy means greedy
    decoder = Decoder(model, compiler="inductor")
    prompts = (PROMPT, list(range(40)), PROMPT)  # nothing stays in the cache
    for prompt, step in zip(prompts, (1, 5, 12), strict=True):
        found = decoder.generate(prompt, 12, capture_at=step)
        with torch.no_grad():
            text = torch.tensor([prompt + found.tokens])
            plain = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert found.tokens == plain.argmax(1).tolist()
        assert found.captured == pytest.approx(plain[step - 1].tolist(), abs=1e-3)
        assert 0 < found.first_token_seconds <= found.seconds
    with pytest.raises(InterruptedError):
        decoder.generate(PROMPT, 40, cancelled=lambda: True)


HYBRID: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "block_size": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
}


def test_a_model_that_cannot_decode_is_refused_when_it_loads(model: Any) -> None:
    from neurons.inference_server import own_cache
    from neurons.inference_server.model import Decoder

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("0 active drivers\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_cache, "has_own_cache", lambda _: True)
        patch.setattr(type(model), "generate", broken)
        with pytest.raises(ValueError, match="Qwen2ForCausalLM cannot decode: 0 active drivers"):
            Decoder(model)
