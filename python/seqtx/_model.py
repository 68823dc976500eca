"""Models, their memories, generators and optimisers."""
import codecs
import ctypes
import json
import math
import os
import random
import weakref
from types import TracebackType
from typing import (Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Type, TypeVar,
                    Union)

import numpy as np

from . import _checkpoint
from ._context import Context, array_of, fill, lib
from ._vocab import Text, Vocab, as_bytes, as_ids, as_path

Path = Union[str, "os.PathLike[str]"]
M = TypeVar("M", bound="Model")

# the stx_memory fields of each family's state
MEMORIES = {"attn_span": ["memory"], "sru": ["states", "memory"], "compressive": ["mem", "comp"],
            "par": ["mem"]}
STATES = {"attn_span": "stx_span_state", "sru": "stx_sru_state", "compressive": "stx_comp_state",
          "par": "stx_par_state"}


def _check(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises ValueError unless a number is in a range. NaN is in none."""
    if not least <= value <= most:
        end = f" to {most:g}" if most < math.inf else " or more"
        raise ValueError(f"{name}: expected {least:g}{end}, got {value!r}")


class Score(NamedTuple):
    """The likelihood of a text. bytes: of token ids, those of the decoded text, which can
    differ from the text before; 0 if the model has no vocabulary."""
    tokens: int
    bytes: int
    nats: float

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / bytes; NaN if the bytes are not known"""
        if not self.bytes:
            return math.nan if self.tokens else 0.0
        return self.nats / math.log(2.0) / self.bytes

    @property
    def perplexity(self) -> float:
        """e^(nats / tokens)"""
        return math.exp(self.nats / self.tokens) if self.tokens else 1.0


class Model:
    """A language model: seqtx.open() reads one from a checkpoint; AttnSpan, Sru,
    Compressive and Par create new ones.

    Keyword arguments are the fields of the family's desc in its header (stx_span_desc,
    stx_sru_lm_desc, stx_comp_desc, stx_par_desc); 0, or no argument, means the default.
    `vocab` is a number of ids or a Vocab. A string names a constant: compress="conv" is
    STX_COMP_COMPRESS_CONV. These arguments belong to the context:

        threads     0: one per processor
        seed        of initial values and dropout
        precision   "f32" or "bf16"
        max_bytes   limit of the memory; 0: none

    The model owns its memory. close(), or the end of a `with` block, gives up the model;
    the memory is freed as soon as no array of params, grads or a Memory refers to it."""

    family = ""

    def __init__(self, vocab: Union[int, Vocab], *, threads: int = 0, seed: int = 0,
                 precision: str = "f32", max_bytes: int = 0, **desc: Any) -> None:
        if self.family not in _checkpoint.FAMILIES:
            raise TypeError("create an AttnSpan, Sru, Compressive or Par")
        stem, struct = _checkpoint.FAMILIES[self.family][:2]
        keep: List[Any] = []
        size = len(vocab) if isinstance(vocab, Vocab) else vocab
        d = fill(getattr(lib, struct)(), "STX_" + stem.split("_")[0].upper(),
                 dict(desc, vocab=size), keep)
        context = Context(threads=threads, seed=seed, precision=precision, max_bytes=max_bytes)
        with context.use() as x:
            model = getattr(lib, f"stx_{stem}_create")(x, ctypes.byref(d))
        self._made(context, model, vocab if isinstance(vocab, Vocab) else None, {})

    @classmethod
    def _open(cls, path: Path, precision: Optional[str], **options: Any) -> "Model":
        context = Context(precision=precision or "f32", **options)
        with context.use() as x:
            f = lib.stx_file_open(x, as_path(path))
        try:
            config = _checkpoint.options_of(f)
            wanted = str(config.get("precision", "f32"))
            if precision is None and wanted != "f32":       # that of the run
                return cls._open(path, wanted, **options)
            with context.use() as x:
                family, model = _checkpoint.open_model(x, f)
                stored = lib.stx_file_find(f, b"vocab")
            vocab = None
            if stored:
                entry = ctypes.cast(stored, ctypes.POINTER(lib.stx_entry)).contents
                vocab = Vocab.from_bytes(ctypes.string_at(entry.data, entry.bytes))
        finally:
            lib.stx_file_close(f)
        made = {c.family: c for c in Model.__subclasses__()}[family]
        self = made.__new__(made)
        self._made(context, model, vocab, config)
        return self

    def _made(self, context: Context, model: int, vocab: Optional[Vocab],
              config: Dict[str, Any]) -> None:
        stem = _checkpoint.FAMILIES[self.family][0].split("_")[0]
        self._context: Optional[Context] = context
        self._lm = getattr(lib, f"stx_{stem}_as_lm")(model)
        if not self._lm.model:
            raise ValueError("vocab: expected the number of ids, got 0")
        self.vocab = vocab
        self._config = config
        self._window = 0
        self._block = config.get("eval-block-sz") or config.get("block-sz") or 128
        if self.family == "sru" and config:
            self._block = self._window = config["eval-unroll"] or config["block-sz"]
        self._params: Optional[Dict[str, Any]] = None
        self._grads: Optional[Dict[str, Any]] = None

    # ---- life ----

    def close(self) -> None:
        """Gives up the model. Arrays stay valid, and keep its memory."""
        self._context = self._params = self._grads = None

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._context is None:
            return f"<{type(self).__name__}, closed>"
        return f"<{type(self).__name__} with {self.size} parameters>"

    @property
    def context(self) -> Context:
        """The owner of the model's memory."""
        if self._context is None:
            raise ValueError("the model was closed")
        return self._context

    @property
    def pointer(self) -> int:
        """The model as a pointer, for functions of seqtx.lib, such as
        seqtx.lib.stx_par_set_tau(model.pointer, 0.5). These check nothing."""
        self.context
        return int(self._lm.model)

    # ---- what it is ----

    @property
    def desc(self) -> Dict[str, Any]:
        """The fields of the desc, with the defaults filled in."""
        return _checkpoint.desc_of(self.family, self.pointer)

    @property
    def size(self) -> int:
        """The number of parameter elements."""
        self.context
        return int(lib.stx_params_size(self._lm.params))

    @property
    def params(self) -> Dict[str, Any]:
        """The parameters by name, as arrays that share the model's memory: writing to an
        array changes the model. After pack(), call pack() again."""
        if self._params is None:
            self._params = self._arrays("data")
        return dict(self._params)

    @property
    def grads(self) -> Dict[str, Any]:
        """The gradients of the parameters, likewise. Loss.backward adds to them;
        Optim.step zeroes them."""
        if self._grads is None:
            self._grads = self._arrays("grad")
        return dict(self._grads)

    def _arrays(self, field: str) -> Dict[str, Any]:
        context = self.context
        desc = ctypes.cast(lib.stx_ctx_desc(context._address), ctypes.POINTER(lib.stx_desc))
        if desc.contents.device != lib.STX_CPU:
            raise ValueError("parameters on a GPU cannot be arrays of numpy")
        arrays = {}
        for params in self._lists():
            p = ctypes.cast(params, ctypes.POINTER(lib.stx_params)).contents
            names = ctypes.cast(p.name, ctypes.POINTER(ctypes.c_char_p))
            tensors = ctypes.cast(p.tensor, ctypes.POINTER(ctypes.POINTER(lib.stx_tensor)))
            for i in range(p.count):
                t = tensors[i].contents
                arrays[names[i].decode()] = array_of(context, getattr(t, field),
                                                     tuple(t.dim[:t.ndim]))[0]
        return arrays

    def _lists(self) -> List[int]:
        """The lists of parameters: the weights, and the gates of a search."""
        return _checkpoint.lists_of(self.family, self.pointer)

    # ---- training ----

    def loss(self, inputs: Any, targets: Any, memory: "Optional[Memory]" = None) -> "Loss":
        """Runs the model in a training step. inputs and targets are token ids, (B,T) or
        (T). `memory` is read and then replaced; None: the text begins here. The loss ends
        with the next call of loss, evaluate, predict or a generator."""
        with self.context.use() as x:
            nll = self._run(x, lib.STX_TRAIN, inputs, targets, memory)
            value = lib.stx_item(x, nll)
            total = self._lm.total(self._lm.model, nll) if nll else None
            return Loss(self, total, value, lib.stx_item(x, total))

    def evaluate(self, inputs: Any, targets: Any, memory: "Optional[Memory]" = None) -> float:
        """The mean negative log-likelihood of the targets in nats per token, without
        dropout or gradients."""
        with self.context.use() as x:
            return float(lib.stx_item(x, self._run(x, lib.STX_EVAL, inputs, targets, memory)))

    def _run(self, x: int, mode: int, inputs: Any, targets: Any, memory: "Optional[Memory]") -> int:
        ids, out = as_ids(inputs), as_ids(targets)
        if ids.shape != out.shape or ids.ndim not in (1, 2) or not ids.size:
            raise ValueError(f"expected inputs and targets of one shape, (B,T) or (T), got "
                             f"{ids.shape} and {out.shape}")
        B, T = ids.shape if ids.ndim == 2 else (1, ids.size)
        state = memory._state(self) if memory is not None else None
        self.context.begin(mode)
        nll: int = self._lm.loss(self._lm.model, lib.stx_tokens(x, ids.ctypes.data, B, T),
                                 lib.stx_tokens(x, out.ctypes.data, B, T), state, state)
        return nll

    def memory(self, batch: int = 1) -> "Memory":
        """A new, empty memory for a batch of texts."""
        return Memory(self, batch)

    # ---- likelihood ----

    def predict(self, inputs: Any, memory: "Optional[Memory]" = None) -> "Any":
        """log p of every id after each input: inputs (B,T) or (T) -> (B,T,V) or (T,V)."""
        ids = as_ids(inputs)
        if ids.ndim not in (1, 2) or not ids.size:
            raise ValueError(f"expected token ids of shape (B,T) or (T), got {ids.shape}")
        B, T = ids.shape if ids.ndim == 2 else (1, ids.size)
        stem = _checkpoint.FAMILIES[self.family][0]
        pad = (None,) if self.family == "compressive" else ()
        with self.context.use() as x:
            state = memory._state(self) if memory is not None else None
            self.context.begin(lib.STX_EVAL)
            h = getattr(lib, f"stx_{stem}_forward")(
                self._lm.model, lib.stx_tokens(x, ids.ctypes.data, B, T), *pad, state, state)
            t = getattr(lib, f"stx_{stem}_log_probs")(self._lm.model, h)
            out = np.empty(ids.shape + (self._classes(),), np.float32)
            if t:
                lib.stx_get(x, t, out.ctypes.data)
        return out

    def log_probs(self, text: Union[Text, Iterable[int]], block: int = 0) -> "Any":
        """log p of each token of a text, or of token ids, given all tokens before it; the
        first follows a line end. With block = 0 the model reads token by token, as in
        generation. With block = N, it reads N tokens at a time, which is faster."""
        _check("block", block, 0)
        ids = self._ids(text)
        before = np.concatenate([np.array([self._start()], np.int32), ids[:-1]])
        out = np.empty(ids.size, np.float64)
        if block:
            memory = Memory(self, 1, self._window)
            for i in range(0, ids.size, block):
                table = self.predict(before[i:i + block], memory)
                rows = np.arange(len(table))
                out[i:i + block] = table[rows, ids[i:i + block]]
            return out
        with self.generator() as g:
            for i in range(ids.size):
                s = g.feed(before[i:i + 1])[0].astype(np.float64)
                top = s.max()
                out[i] = s[ids[i]] - (top + math.log(np.exp(s - top).sum()))
        return out

    def score(self, text: Union[Text, Iterable[int]], block: Optional[int] = None) -> Score:
        """The likelihood of a text, or of token ids, as train_.. --score prints it. The model
        reads `block` tokens at a time; None: as the evaluations of the checkpoint."""
        block = block or self._block
        _check("block", block, 1)
        ids = self._ids(text)
        before = np.concatenate([np.array([self._start()], np.int32), ids[:-1]])
        memory = Memory(self, 1, self._window)
        nats = 0.0
        desc = self.desc
        pad = desc["pad_id"] if desc.get("pads") and not desc["divide_all"] else None
        for i in range(0, ids.size, block):
            part = ids[i:i + block]
            counted = part.size if pad is None else int((part != pad).sum())
            mean = self.evaluate(before[i:i + block], part, memory)
            nats += mean * counted if counted else 0.0
        whole = b"" if self.vocab is None else self.vocab.decode_bytes(ids)
        if isinstance(text, (str, bytes)):
            whole = as_bytes(text)
        return Score(int(ids.size), len(whole), nats)

    # ---- generation ----

    def generator(self, batch: int = 1) -> "Generator":
        """A generator for a batch of texts."""
        return Generator(self, batch)

    def generate_ids(self, prompt: Any = (), tokens: int = 200, *, temperature: float = 0.8,
                     top_k: int = 0, top_p: float = 0.95, repetition_penalty: float = 1.0,
                     repetition_window: int = 64, seed: Optional[int] = None) -> Iterator[int]:
        """Yields ids that continue the ids of the prompt; without a prompt, the text begins
        after a line end. temperature = 0: always the most likely id. The penalty applies to
        the last repetition_window ids, 0: to all. seed = None: another text each time."""
        _check("tokens", tokens, 0)
        _check("temperature", temperature, 0, 1000)
        _check("top_k", top_k, 0)
        _check("top_p", top_p, 0, 1)
        _check("repetition_penalty", repetition_penalty, 1, 100)
        _check("repetition_window", repetition_window, 0)
        ids = as_ids(prompt).ravel()
        if not ids.size:
            ids = np.array([self._start()], np.int32)
        draw = lib.stx_sampling(
            temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=random.getrandbits(63) if seed is None else seed)
        work = np.empty(self._classes(), np.float32)
        recent = ids.tolist()
        with self.generator() as g:
            for i in range(tokens):
                scores = g.feed(ids)
                some = np.array(recent[-repetition_window:] if repetition_window
                                else sorted(set(recent)), np.int32)
                draw.recent, draw.recent_count = some.ctypes.data, some.size
                token = int(lib.stx_sample(ctypes.byref(draw), i, scores.ctypes.data, work.size,
                                           work.ctypes.data))
                if token < 0:
                    raise ValueError("cannot sample: a sampling option is invalid, or the model's "
                                     "output is not finite")
                recent.append(token)
                ids = np.array([token], np.int32)
                yield token

    def stream(self, prompt: Text = "", tokens: int = 200, *, seed: Optional[int] = None,
               stop: Optional[str] = None, **sampling: Any) -> Iterator[str]:
        """Yields the text that continues a prompt, piece by piece, and ends early once it
        contains `stop`. The other options are those of generate_ids. With the same seed,
        the text is that of train_.. --generate."""
        vocab, start = self._vocab(), as_bytes(prompt)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if seed is not None and start:          # other prompts get other draws
            seed ^= _hash(start)
        end, text = start[-1:] or b"\n", ""
        for id in self.generate_ids(vocab.encode(start, part=True) if start else (), tokens,
                                    seed=seed, **sampling):
            piece = vocab.decode_bytes([id])
            if vocab.kind in ("spm", "ids") and piece[:1] == b" " and end in (b"\n", b" "):
                piece = piece[1:]
            end = piece[-1:] or end
            new = decoder.decode(piece)
            text += new
            if new:
                yield new
            if stop and stop in text:
                return
        last = decoder.decode(b"", True)
        if last:
            yield last

    def generate(self, prompt: Text = "", tokens: int = 200, **options: Any) -> str:
        """The text that continues a prompt: all of stream()."""
        return "".join(self.stream(prompt, tokens, **options))

    def encode(self, text: Text) -> "Any":
        """vocab.encode(text)"""
        return self._vocab().encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """vocab.decode(ids)"""
        return self._vocab().decode(ids)

    # ---- files ----

    def save(self, path: Path, optim: "Optional[Optim]" = None) -> None:
        """Writes the model, and the vocabulary and an optimiser if there are any, to a
        safetensors file, atomically. seqtx.open reads the file. If seqtx.open has read the
        model from a checkpoint of a trainer, so does --init-from of that trainer."""
        blob = self.vocab.to_bytes() if self.vocab is not None else b""
        state = optim._of(self) if optim is not None else None
        with self.context.use() as x:
            w = lib.stx_writer_create(x)
            if self._config:
                lib.stx_writer_meta(w, b"format", f"seqtx.{self.family}.1".encode())
                lib.stx_writer_meta(w, b"config", json.dumps(self._config).encode())
                lib.stx_writer_meta(w, b"step", b"0")
            lib.stx_model_write(w, _checkpoint.family_of(self.family), self.pointer)
            if state:
                lib.stx_optim_save(w, state)
            if blob:
                size = ctypes.c_size_t(len(blob))
                lib.stx_writer_add(w, b"vocab", lib.STX_U8, 1, ctypes.byref(size), blob)
            lib.stx_writer_checksum(w)
            lib.stx_writer_finish(w, as_path(path))

    def load(self, path: Path, optim: "Optional[Optim]" = None) -> None:
        """Reads the parameters, and the state of an optimiser if one is given, from a file."""
        state = optim._of(self) if optim is not None else None
        with self.context.use() as x:
            f = lib.stx_file_open(x, as_path(path))
            for params in self._lists():
                lib.stx_params_load(params, f, b"")
            if state:
                lib.stx_optim_load(state, f)
            lib.stx_file_close(f)

    def pack(self, weights: str = "int8") -> int:
        """Rounds the matrices to "bf16" or "int8", which speeds up generation. Returns the
        bytes of the packed copies."""
        kinds = {"f32": lib.STX_WEIGHTS_F32, "bf16": lib.STX_WEIGHTS_BF16,
                 "int8": lib.STX_WEIGHTS_INT8}
        if weights not in kinds:
            raise ValueError(f"weights: expected one of {', '.join(kinds)}, got {weights!r}")
        with self.context.use():
            return int(lib.stx_params_pack(self._lm.params, kinds[weights]))

    # ---- inside ----

    def _vocab(self) -> Vocab:
        if self.vocab is None:
            raise ValueError("the model has no vocabulary: create it with vocab=seqtx.Vocab(..), "
                             "or use token ids")
        return self.vocab

    def _classes(self) -> int:
        return int(self.desc["vocab"])

    def _ids(self, text: Any) -> "np.ndarray[Any, np.dtype[np.int32]]":
        if isinstance(text, (str, bytes)):
            return self._vocab().encode(text)
        return as_ids(text).ravel()

    def _start(self) -> int:
        """The id before a text: a line end, or the closest that the vocabulary has."""
        if self.vocab is None:
            return 0
        for id in (self.vocab.eos, self.vocab.find(b"\n"), self.vocab.find("\u2581.")):
            if id is not None:
                return id
        return 0


class AttnSpan(Model):
    """A Sequential Transformer with adaptive spans (seqtx_attn_span.h)."""
    family = "attn_span"

    @property
    def spans(self) -> "Any":
        """The learned span of each head in tokens, (layers,heads)."""
        d = self.desc
        heads = 1 if d["span_per_layer"] else d["heads"]
        return np.array([[lib.stx_span_head_span(self.pointer, layer, head)
                          for head in range(heads)] for layer in range(d["layers"])])


class Sru(Model):
    """A language model of SRU or SRU++ layers (seqtx_sru.h). Fields of stx_sru_desc, such as
    layers and heads, are arguments, too."""
    family = "sru"


class Compressive(Model):
    """A Compressive Transformer (seqtx_compressive.h)."""
    family = "compressive"


class Par(Model):
    """A Transformer-XL, a network of any pattern of blocks, or a search for one
    (seqtx_par.h)."""
    family = "par"


class Loss:
    """The loss of a training step. float(loss) and loss.nll are the mean negative
    log-likelihood in nats per token; loss.total includes penalties."""

    def __init__(self, model: Model, tensor: Optional[int], nll: float, total: float) -> None:
        self._model, self._tensor = model, tensor
        self._step = model.context.steps
        self.nll, self.total = float(nll), float(total)

    def __float__(self) -> float:
        return self.nll

    def __repr__(self) -> str:
        return f"<Loss {self.nll:.4f}>"

    def backward(self, scale: float = 1.0) -> None:
        """Adds the gradients of scale times the total to model.grads."""
        context = self._model.context
        with context.use() as x:
            if context.steps != self._step:
                raise RuntimeError("backward: another step has begun since; call it right after "
                                   "loss()")
            total = self._tensor if scale == 1.0 else lib.stx_scale(x, self._tensor, scale)
            lib.stx_backward(x, total)


class Memory:
    """What a model remembers of a batch of texts, from one step to the next."""

    def __init__(self, model: Model, batch: int, window: int = 0) -> None:
        _check("batch", batch, 1, 1 << 31)
        self._model, self.batch = model, batch
        self._views: "List[weakref.ref[Any]]" = []
        with model.context.use():
            self._address = model._lm.state_create(model._lm.model, batch, window)
        self._context = model.context
        self._context.free_with(self, model._lm.state_free, self._address)

    def _state(self, model: Model) -> int:
        """The state for a call that can change or move it."""
        if self._model is not model:
            raise ValueError("the memory belongs to another model")
        self._views = [v for v in self._views if v() is not None]
        if self._views:
            raise BufferError("arrays of this memory are still in use: delete or copy() them "
                              "before the memory changes")
        return int(self._address)

    def reset(self, stream: Optional[int] = None) -> None:
        """Empties the memory, or that of one text of the batch."""
        with self._model.context.use():
            if stream is None:
                self._model._lm.state_reset(self._state(self._model))
            else:
                self._model._lm.state_reset_stream(self._state(self._model), stream)

    def arrays(self) -> Dict[str, List[Any]]:
        """The rows of each layer, oldest first, as read-only arrays that share the memory:
        {"memory": [(B,rows,width) of layer 0, ..]}. The names are those of the family's
        state. While an array exists, calls that would change the memory raise BufferError;
        copy() what you want to keep."""
        context = self._model.context           # an open model
        state = ctypes.cast(self._address, ctypes.POINTER(
            getattr(lib, STATES[self._model.family]))).contents
        found: Dict[str, List[Any]] = {}
        with context.use():
            for name in MEMORIES[self._model.family]:
                if not getattr(state, name):
                    continue
                memory = ctypes.cast(getattr(state, name), ctypes.POINTER(lib.stx_memory)).contents
                layers = ctypes.cast(memory.layer, ctypes.POINTER(lib.stx_memory_layer))
                found[name] = [self._rows(layers[i]) for i in range(memory.desc.layers)]
        return found

    def _rows(self, layer: Any) -> Any:
        shape = (self.batch, int(layer.count), int(layer.width))
        if not layer.data or not layer.count:
            return np.zeros((self.batch, 0, layer.width), np.float32)
        array, buffer = array_of(self, layer.data, shape, writable=False, stride=layer.stride)
        self._views.append(weakref.ref(buffer))
        return array

    def save(self, path: Path) -> None:
        """Writes the memory to a safetensors file."""
        with self._model.context.use() as x:
            w = lib.stx_writer_create(x)
            self._model._lm.state_save(w, self._address, b"")
            lib.stx_writer_finish(w, as_path(path))

    def load(self, path: Path) -> None:
        """Reads a memory that save() wrote, of the same model and batch."""
        with self._model.context.use() as x:
            state = self._state(self._model)
            f = lib.stx_file_open(x, as_path(path))
            if f:
                self._model._lm.state_load(state, f, b"")
            lib.stx_file_close(f)


class Generator:
    """Reads texts token by token, with log p of the next token after each call."""

    def __init__(self, model: Model, batch: int = 1) -> None:
        _check("batch", batch, 1, 1 << 31)
        self._model, self.batch = model, batch
        with model.context.use():
            address = model._lm.gen_create(model._lm.model, batch, model._window)
        self._address: Optional[int] = address
        self._classes = model._classes()
        self._context = model.context
        self._free = self._context.free_with(self, model._lm.gen_free, address)

    def close(self) -> None:
        """Frees the generator."""
        self._address = None
        self._free()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def feed(self, ids: Any) -> "Any":
        """Reads ids (B,n), or (n) if the batch is 1. Returns (B,V): log p of the next token,
        up to a constant per row."""
        array = as_ids(ids)
        if array.ndim == 1 and self.batch == 1:
            array = array.reshape(1, -1)
        if array.ndim != 2 or array.shape[0] != self.batch or not array.size:
            raise ValueError(f"expected ids of shape ({self.batch},n), got {array.shape}")
        out = np.empty((self.batch, self._classes), np.float32)
        with self._model.context.use():
            self._context.steps += 1        # gen_feed begins a step
            scores = self._model._lm.gen_feed(self._open(), array.ctypes.data, array.shape[1])
            if scores:
                ctypes.memmove(out.ctypes.data, scores, out.nbytes)
        return out

    def reset(self) -> None:
        """Forgets the texts. Required after an error, and after the parameters changed."""
        with self._model.context.use():
            self._model._lm.gen_reset(self._open())

    def _open(self) -> int:
        if self._address is None:
            raise ValueError("the generator was closed")
        return self._address


class Optim:
    """An optimiser of all parameters of a model. kind: "sgd", "adagrad", "adam", "adamw",
    "radam", "lamb" or "muon"; other arguments are the fields of stx_optim_desc, such as
    clip=1.0. gates=True: of the gates of a Par that searches, instead of its weights."""

    def __init__(self, model: Model, kind: str = "adam", *, gates: bool = False,
                 **desc: Any) -> None:
        d = fill(lib.stx_optim_desc(), "STX", dict(desc, kind=kind))
        lists = model._lists()
        if gates and len(lists) < 2:
            raise ValueError("gates: expected a Par without a pattern")
        with model.context.use():
            address = lib.stx_optim_create(lists[gates], ctypes.byref(d))
        self._model, self._address = model, address

    def _of(self, model: Model) -> int:
        if self._model is not model:
            raise ValueError("the optimiser belongs to another model")
        return int(self._address)

    def step(self, lr: float) -> bool:
        """Updates the parameters from their gradients with the learning rate lr, and zeroes
        the gradients. Returns False if a gradient is not finite: nothing is updated then."""
        with self._model.context.use():
            lib.stx_optim_step(self._address, lr)
            done = bool(lib.stx_optim_sync(self._address))
            if done:
                self._model._lm.updated(self._model._lm.model)
        return done

    @property
    def steps(self) -> int:
        """The number of updates."""
        return int(self._struct().step)

    @property
    def grad_norm(self) -> float:
        """The norm of the last gradient, before clipping."""
        return float(self._struct().grad_norm)

    def _struct(self) -> Any:
        self._model.context             # an open model
        return ctypes.cast(self._address, ctypes.POINTER(lib.stx_optim)).contents


class Schedule:
    """A learning rate by step: Schedule("cosine", lr=0.003, warmup=100, total=5000)(n), for
    n = 1, 2, .. kind: "constant", "cosine", "inv-sqrt", "recursive" or "noam"; other
    arguments are the fields of stx_schedule."""

    def __init__(self, kind: str = "cosine", **fields: Any) -> None:
        self._schedule = fill(lib.stx_schedule(), "STX_LR", dict(fields, kind=kind))

    def __call__(self, n: int) -> float:
        return float(lib.stx_schedule_lr(ctypes.byref(self._schedule), n))


def _hash(data: bytes) -> int:
    """FNV-1a with 64 bits, as the trainers hash a prompt."""
    h = 14695981039346656037
    for byte in data:
        h = (h ^ byte) * 1099511628211 % 2**64
    return h
