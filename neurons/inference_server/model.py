"""The reference model: loaded through transformers, decoded greedily over a static cache.

Each step runs the same operations on the same buffers. On a GPU, a step is compiled and captured
once as a CUDA graph. Its replays do not make the host wait for the GPU at each token. Models that
need their own cache are decoded by `own_cache`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from neurons.inference_server import own_cache
from neurons.inference_server.own_cache import CHECK_STEPS
from neurons.inference_server.queue import Generation
from neurons.runtime.observe import get_logger

BUCKET = 256
"""The number of a cache's positions is a multiple of this, so that few caches are needed."""
WARM_UPS = 3
"""Steps that run before one is captured."""
CAUSE_CHARACTERS = 300
"""Limit on the characters of a compiler's message, which may be pages long."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Compiler = str | Callable[..., Any]
"""A backend of torch.compile: its name, or the function."""

log = get_logger("inference")


def load_model(name: str, device: str, dtype: str) -> Any:
    """Load a model by its name in the hub, or from a folder, in evaluation mode.

    `dtype` is one of `DTYPES`, or `auto`: bfloat16 on a GPU, float32 on a CPU. Raises an OSError or
    ValueError if there is no such language model.
    """
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=DTYPES[dtype], attn_implementation="sdpa", use_safetensors=True
    )
    return model.to(device).eval()


class _Lane:
    """The buffers for one cache length, and the step that advances them."""

    def __init__(self, model: Any, one_token: Callable[..., Any], length: int) -> None:
        device = model.device
        self._model, self._one_token, self.length = model, one_token, length
        self.cache: Any = StaticCache(config=model.config, max_cache_len=length)
        self.tokens = torch.zeros(1, length + 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros(1, model.config.vocab_size, device=device)
        self._columns = torch.arange(length, device=device)
        self._graph: Any = None

    def start(self, prompt: Sequence[int]) -> None:
        """Process the prompt; store the first new token in `tokens`, its logits in `logits`."""
        count = len(prompt)
        if self.cache.layers[0].is_initialized:
            self.cache.reset()
        self.tokens[0, :count] = torch.tensor(prompt, device=self.tokens.device)
        positions = torch.arange(count, device=self.tokens.device)
        self._forward(self._model, self.tokens[:, :count], positions)
        self.position.fill_(count)
        self._choose()

    def step(self) -> None:
        """Process the newest token and choose the next one."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._advance()

    def capture(self) -> None:
        """Capture a step as a CUDA graph; this changes the buffers, so call `start` afterwards."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self._graph = graph

    def _advance(self) -> None:
        token = self.tokens.index_select(1, self.position)
        self._forward(self._one_token, token, self.position)
        self.position.add_(1)
        self._choose()

    def _forward(
        self, model: Callable[..., Any], tokens: torch.Tensor, positions: torch.Tensor
    ) -> None:
        seen = self._columns[None, :] <= positions[:, None]
        output = model(
            input_ids=tokens,
            position_ids=positions[None, :],
            attention_mask=seen[None, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits.copy_(output.logits[:, -1])

    def _choose(self) -> None:
        self.tokens.index_copy_(1, self.position, self.logits.argmax(-1, keepdim=True))


def _most_positions(config: Any) -> int:
    """Return the largest number of positions for which every layer's cache fits the mask.

    The mask has a column for each position. A layer with a sliding window keeps only the positions
    in its window, so its cache does not fit a longer mask.
    """
    most = int(config.max_position_embeddings)
    length = -(-most // BUCKET) * BUCKET
    layers: Any = StaticCache(config=config, max_cache_len=length).layers
    window = min(int(layer.max_cache_len) for layer in layers)
    return most if window == length else window // BUCKET * BUCKET


class Decoder:
    """Greedy decoding of one request at a time: the same answer to the same prompt.

    Raises a ValueError if the model cannot decode.

    Args:
        graphs: whether steps are captured as CUDA graphs; on a CPU there are none.
        compiler: the backend of torch.compile, which compiles steps once for all lengths. If it is
            None, or if it fails, which is logged, steps are not compiled.
    """

    def __init__(
        self, model: Any, *, graphs: bool = True, compiler: Compiler | None = None
    ) -> None:
        self.model = model
        self.device = str(model.device.type)
        self._graphs = graphs and self.device == "cuda"
        self._one_token: Callable[..., Any] = model
        self._lanes: dict[int, _Lane] = {}
        self._own_cache = own_cache.has_own_cache(model.config)
        torch.backends.cuda.matmul.allow_tf32 = False
        # the largest number of positions of the model and its cache
        self.longest = (
            int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
            if self._own_cache
            else _most_positions(model.config)
        )
        if self._own_cache:
            self._try_own_cache()
        elif compiler is not None:
            self._compile(compiler)

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        capture_at: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Return `new_tokens` tokens; generation continues after an end-of-text token.

        The logits of token `capture_at`, from 1, are kept. Raises an InterruptedError when
        `cancelled`, which is called every CHECK_STEPS tokens, returns true.
        """
        if self._own_cache:
            return own_cache.generate(self.model, prompt, new_tokens, capture_at, cancelled)
        begun = time.perf_counter()
        lane = self._lane(len(prompt) + new_tokens)
        lane.start(prompt)
        captured = lane.logits.clone() if capture_at == 1 else None
        self._wait()
        first = time.perf_counter() - begun
        for number in range(2, new_tokens + 1):
            if number % CHECK_STEPS == 0:
                self._wait()  # otherwise queued steps would delay a cancellation
                if cancelled():
                    raise InterruptedError
            lane.step()
            if number == capture_at:
                captured = lane.logits.clone()
        tokens = lane.tokens[0, len(prompt) : len(prompt) + new_tokens].tolist()
        kept = None if captured is None else captured[0].float().tolist()
        return Generation(tokens, kept, time.perf_counter() - begun, first)

    def _try_own_cache(self) -> None:
        """Decode two tokens, so that a model that cannot decode fails now, not at each request."""
        name = type(self.model).__name__
        try:
            self.generate([0], 2)
        except Exception as error:  # a model may fail in any way
            cause = " ".join(str(error).split())[:CAUSE_CHARACTERS]
            raise ValueError(f"{name} cannot decode: {cause}") from error
        log.info("decoding is not compiled: the model has its own cache", model=name)

    @torch.inference_mode()
    def _compile(self, compiler: Compiler) -> None:
        """Compile a step now; otherwise the first request would wait for the compilation."""
        begun = time.perf_counter()
        # sizes are symbolic: a cache of another length uses the same compiled code
        self._one_token = torch.compile(
            self.model.forward, dynamic=True, fullgraph=True, backend=compiler
        )
        try:
            lane = self._lane(1)
            lane.start([0])
            lane.step()
            self._wait()
        except Exception as error:  # a compiler, its tools or a model may fail in any way
            self._one_token, self._lanes = self.model, {}
            log.warning(
                "decoding is not compiled, so it is slower",
                cause=" ".join(str(error).split())[:CAUSE_CHARACTERS],
                remedy="Install a C compiler, or set INFERENCE_COMPILE=false.",
            )
        else:
            log.info("decoding is compiled", seconds=round(time.perf_counter() - begun, 1))

    def _lane(self, positions: int) -> _Lane:
        length = -(-positions // BUCKET) * BUCKET
        if length not in self._lanes:
            lane = _Lane(self.model, self._one_token, length)
            lane.start([0])  # allocates the cache's buffers
            if self._graphs:
                lane.capture()
                log.info("decoding is captured", positions=length)
            self._lanes[length] = lane
        return self._lanes[length]

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
