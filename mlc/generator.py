"""Language models that generate: a compiled decoder and the keys and values of the tokens that it has seen.

One artifact serves prompts and single tokens. Keys and values lie in buffers as long as the capacity, to which compiled
code adds in place (:mod:`mlc.graph.ir.states`): a call is given the part of them up to its last token, so that what a
token takes depends on the tokens before it, and not on the capacity.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import InputError, ModelError, UsageError
from mlc.sampler import Sampler
from mlc.shapes import Free

if TYPE_CHECKING:
    from mlc.artifact import Executable
    from mlc.compilation import Compilation
    from mlc.log import LogReader
    from mlc.target import Target

__all__ = ["Generator"]

#: logits ``[batch, vocabulary]`` --> a token id for each sequence
Sample = Callable[[np.ndarray], Any]

#: what configurations call the most tokens that a model was made for, and those that end a text
_CAPACITIES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "context_length")
_ENDS = ("eos_token_id",)
#: files beside a model's, and attributes of a module, the first that says something counts
_FILES = ("generation_config.json", "config.json", "genai_config.json")
_ATTRIBUTES = ("generation_config", "config")


class Generator:
    """A language model and its state: ``for token in generator(prompt_ids, max_new_tokens=20): ...``.

    ``length`` is how many tokens the state holds, of at most ``capacity`` (both of each of ``batch`` sequences).
    Tokens are numbers; a tokeniser makes them, and text of them. Not for several threads at once.
    """

    def __init__(
        self, model: Any, *, capacity: int | None = None, batch: int = 1, target: str | Target = "native",
        log: str | os.PathLike[str] | LogReader | bool | None = None, threads: int | None = None,
        precision: str = "f32", stop: int | Collection[int] | None = None,
    ) -> None:
        """``model`` is the path of an ONNX file or an ``onnx.ModelProto`` with past keys and values as inputs and the
        present ones as outputs, a causal language model of transformers, or what :meth:`save` wrote (the path or the
        loaded executable), which has its capacity and batch.

        ``capacity`` left out is what the model's configuration says: the module's, or that of ``config.json`` beside
        the file. ``stop`` are token ids that end a sequence; left out, those by which the configuration says that a
        text ends (``eos_token_id``), and of what was saved those that it was saved with. ``target``, ``log``,
        ``threads`` and ``precision`` are as for :func:`mlc.compile`. Raises :class:`mlc.errors.MlcError` as that does,
        :class:`mlc.errors.ModelError` for a model without a past, and :class:`mlc.errors.UsageError` for a capacity
        that memory has no room for.
        """
        compiled = _compiled(model)
        self.executable: Executable = compiled if compiled is not None else _build(
            model, capacity, batch, target, log, threads, precision)
        self._read_border()
        if stop is None:
            stop = self.executable.metadata.get("stop", ()) if compiled is not None else _ends(model)
        self.stop = _stops(stop)
        if compiled is not None and capacity is not None and capacity != self.capacity:
            raise UsageError(f"the capacity of a compiled model is what it was compiled for, {self.capacity}, got "
                             f"{capacity}; leave it out, or compile the model again")
        if compiled is None and (turn := _turn(model)) is not None:
            self.executable.metadata["turn"] = turn
        self._turn = int(self.executable.metadata.get("turn", self.capacity))
        self._rows = {spec.name: self.executable.state_memory((self.capacity, *spec.sized()[1:]), spec.dtype)
                      for spec in self._states}
        self._past = np.zeros(self.capacity, np.uint8)
        self._mask = np.ones((self.batch, self.capacity), np.int64)
        self._first = np.zeros(self.batch, np.int64)  # of each sequence, the row of its first token
        self._tokens = np.zeros((self.batch, self.capacity), np.int64)
        self.length = 0

    def _read_border(self) -> None:
        from mlc.frontend.onnx_past import role_of

        exe = self.executable
        self._states = [spec for spec in exe.inputs if spec.name in exe.states]
        if not self._states:
            raise ModelError(f"{exe.metadata['name']} must have a state to generate with, but was compiled without; "
                             "make a Generator of the model itself")
        others = [spec for spec in exe.inputs if spec.name not in exe.states]
        self._roles = {spec.name: role_of(spec.name) or "past" for spec in others[:-1]} | {others[-1].name: "past"}
        tokens = next((spec for spec in others if self._roles[spec.name] == "tokens"), None)
        if tokens is None:
            raise ModelError(f"{exe.metadata['name']} must take token ids, got {', '.join(s.name for s in others)}; "
                             "export the model with input_ids")
        self._types = {spec.name: spec.dtype for spec in others}
        batch, past = tokens.shape[0], others[-1].shape[0]
        assert isinstance(batch, int) and isinstance(past, Free)
        self.batch = batch
        self.capacity = int(past.range.high)
        self._logits = next((i for i, s in enumerate(exe.outputs) if s.name == "logits"), 0)
        shape = exe.outputs[self._logits].shape
        if len(shape) != 3 or isinstance(shape[2], Free):
            raise ModelError(f"the logits of {exe.metadata['name']} must be (batch, tokens, vocabulary), got "
                             f"{exe.outputs[self._logits]}; export the model with its logits first")
        self.vocabulary = int(shape[2])

    def __call__(
        self, prompt_ids: Any, max_new_tokens: int | None = None, sampler: Sample | None = None, *,
        stop: int | Collection[int] | None = None, resume: bool = False,
    ) -> Iterator[Any]:
        """Yield one token after the other: an ``int``, or an array of one for each sequence where ``prompt_ids`` is a
        batch.

        ``prompt_ids`` are the token ids of one sequence, or a list of as many as the batch has; shorter ones are padded
        on the left, which needs a model with a mask. The last token that is yielded is not part of the state yet.
        ``max_new_tokens`` left out is as many as fit. ``sampler`` takes logits ``[batch, vocabulary]`` (float32) and
        returns a token id for each; left out, the likeliest is taken. ``stop`` are token ids that end a sequence
        (default: those of the generator): the last one is yielded, and a batch ends when all of its sequences have,
        those that ended first repeating theirs. ``resume`` puts the prompt behind what the state holds instead of
        starting anew.

        Raises :class:`mlc.errors.InputError`, when called, for ids outside the vocabulary and prompts that do not fit.
        """
        prompt, widths, single = self._prompt(prompt_ids)
        start = self.length if resume else 0
        room = self.capacity - start - prompt.shape[1]
        if room < 0:
            raise InputError(f"a prompt must fit into the capacity of {self.capacity} tokens, got {prompt.shape[1]}"
                             + (f" behind {start}" if start else "") + "; give fewer, or make a generator "
                             "with a larger capacity")
        if max_new_tokens is not None and (isinstance(max_new_tokens, bool) or not hasattr(max_new_tokens, "__index__")
                                           or max_new_tokens < 0):
            raise InputError(f"max_new_tokens must be a whole number of at least 0, got {max_new_tokens!r}")
        count = room + 1 if max_new_tokens is None else int(max_new_tokens)
        if count > room + 1:
            raise InputError(f"the prompt and {count} new tokens must fit into the capacity of {self.capacity}, got "
                             f"{start + prompt.shape[1]} and {count}; ask for at most {room + 1}")
        if resume and widths.min() != prompt.shape[1]:
            raise InputError("sequences that go on must have prompts of one length; start anew, or give equal lengths")
        return self._generated(prompt, widths, single, count, sampler or _likeliest, resume,
                               self.stop if stop is None else _stops(stop))

    def _generated(
        self, prompt: np.ndarray, widths: np.ndarray, single: bool, count: int, sampler: Sample, resume: bool,
        stop: frozenset[int],
    ) -> Iterator[Any]:
        if isinstance(sampler, Sampler):
            sampler.begin(prompt, widths, self.vocabulary, resume)
        if not resume:
            self.reset()
            self._first = prompt.shape[1] - widths
            self._mask[...] = np.arange(self.capacity) >= self._first[:, None]
        given, ended, tokens = prompt, np.zeros(self.batch, np.bool_), np.zeros(self.batch, np.int64)
        for _ in range(count):
            chosen = self._chosen(sampler, self._step(given)[:, -1])
            tokens = np.where(ended, tokens, chosen)
            ended = ended | np.isin(tokens, list(stop))
            yield int(tokens[0]) if single else tokens.copy()
            if ended.all():
                return
            given = tokens[:, None]
        if not count:
            self._step(prompt)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
        self._first[...] = 0
        self._mask[...] = 1

    def logits(self, ids: Any) -> np.ndarray:
        """Logits ``[batch, tokens, vocabulary]`` behind each of ``ids``, which the state holds afterwards.

        Raises :class:`mlc.errors.InputError` as a call does; all sequences have one length.
        """
        given, widths, _ = self._prompt(ids)
        if widths.min() != given.shape[1]:
            raise InputError(f"all sequences must have one length here, got {widths.min()} to {widths.max()} ids")
        if self.length + given.shape[1] > self.capacity:
            raise InputError(f"{given.shape[1]} tokens behind {self.length} must fit into the capacity of "
                             f"{self.capacity}; reset the generator, or make one with a larger capacity")
        return self._step(given)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled model and ``stop``, one file, which a :class:`Generator` can be made of; the state is not
        in it."""
        self.executable.metadata["stop"] = sorted(self.stop)
        self.executable.save(path)

    def __repr__(self) -> str:
        return (f"<Generator {self.executable.metadata['name']}: {self.length} of {self.capacity} tokens, "
                f"batch {self.batch}>")

    def _step(self, ids: np.ndarray) -> np.ndarray:
        """Run the model on tokens behind those that the state holds.

        Beyond some number of tokens a model may turn the keys of all by other angles (long RoPE): then the state is
        made anew, as transformers does.
        """
        begin, end, new = self.length, self.length + ids.shape[1], ids.shape[1]
        self._tokens[:, begin:end] = ids
        longest = int(self._first.min())
        if begin - longest <= self._turn < end - longest:
            begin, ids = 0, self._tokens[:, :end]
        places = np.maximum(np.arange(begin, end) - self._first[:, None], 0)
        made = {"tokens": ids, "mask": self._mask[:, :end], "positions": places, "past": self._past[:begin]}
        given = {name: np.ascontiguousarray(made[role], self._types[name]) for name, role in self._roles.items()}
        given |= {name: _first(rows, end) for name, rows in self._rows.items()}
        result = self.executable(**given)
        self.length = end
        logits: np.ndarray = result[self._logits][:, -new:]
        if self._first.any() and np.isnan(logits[:, -1]).any():  # attention that counts keys says so
            raise InputError(f"sequences must have one length for {self.executable.metadata['name']}, whose attention "
                             "knows no padding on the left; generate from each alone")
        return logits

    def _prompt(self, ids: Any) -> tuple[np.ndarray, np.ndarray, bool]:
        """Ids ``[batch, tokens]`` padded on the left, how many each sequence has, and whether one sequence was given
        alone."""
        try:
            if isinstance(ids, str) or hasattr(ids, "keys"):
                raise TypeError
            single = not len(ids) or np.ndim(ids[0]) == 0
            rows = [np.asarray(row) for row in ([ids] if single else ids)]
        except (TypeError, ValueError, KeyError):
            raise InputError(f"a prompt must be token ids, or a list of them for each sequence, got "
                             f"{type(ids).__name__}; give the input_ids of the model's tokeniser") from None
        if len(rows) != self.batch:
            raise InputError(f"a prompt must have {self.batch} sequences, got {len(rows)}; make a generator with "
                             f"batch={len(rows)}")
        for row in rows:
            if row.ndim != 1 or not row.size:
                raise InputError(f"each sequence must be a list of one token id or more, got one of shape "
                                 f"{list(row.shape)}")
            if row.dtype.kind not in "iu":
                raise InputError(f"token ids must be whole numbers, got {row.dtype}; encode the text with the model's "
                                 "tokeniser")
            wrong = row[(row < 0) | (row >= self.vocabulary)]
            if wrong.size:
                raise InputError(f"token ids must be from 0 to {self.vocabulary - 1}, got {int(wrong[0])}; use the "
                                 "model's own tokeniser")
        widths = np.array([len(row) for row in rows])
        if widths.min() != widths.max() and "mask" not in self._roles.values():
            raise InputError(f"sequences must have one length for a model without a mask, got {widths.min()} to "
                             f"{widths.max()} ids")
        padded = np.zeros((self.batch, widths.max()), np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[len(line) - len(row):] = row
        return padded, widths, single

    def _chosen(self, sampler: Sample, logits: np.ndarray) -> np.ndarray:
        chosen = np.asarray(sampler(logits)).reshape(-1)
        if chosen.shape != (self.batch,) or chosen.dtype.kind not in "iu" or not (
                (chosen >= 0) & (chosen < self.vocabulary)).all():
            raise InputError(f"a sampler must return a token id from 0 to {self.vocabulary - 1} for each of "
                             f"{self.batch} sequences, got {chosen.tolist()}")
        return chosen.astype(np.int64)


def _first(rows: Any, count: int) -> Any:
    """The first rows of a state, in place."""
    if isinstance(rows, np.ndarray):
        return rows[:count]
    from mlc.artifact.runtime import view

    return view(rows, (count, *rows.shape[1:]), str(rows.dtype))


def _likeliest(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits.argmax(-1))


def _stops(stop: int | Collection[int]) -> frozenset[int]:
    if isinstance(stop, Collection):
        return frozenset(map(int, stop))
    return frozenset([int(stop)])  # numpy has whole numbers of its own, too


def _compiled(model: Any) -> Executable | None:
    """The executable that the model is, or that its file holds; None for a model that must be compiled."""
    from mlc.artifact import Executable, load

    if isinstance(model, Executable):
        return model
    if not isinstance(model, str | os.PathLike):
        return None
    try:
        with open(model, "rb") as file:
            return load(model) if file.read(4) == b"\x7fELF" else None
    except OSError:
        return None  # the importer says so


def _build(
    model: Any, capacity: int | None, batch: int, target: str | Target,
    log: str | os.PathLike[str] | LogReader | bool | None, threads: int | None, precision: str,
) -> Executable:
    from mlc.api import build_with
    from mlc.compilation import Compilation

    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch must be a whole number of at least 1, got {batch!r}")
    capacity = _capacity(model) if capacity is None else capacity
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise UsageError(f"capacity must be a whole number of at least 1, got {capacity!r}")
    proto, name = _proto(model, capacity)
    compilation = Compilation.of_decoder(proto, name, batch, capacity, target, threads=threads, precision=precision)
    _check_room(compilation, capacity)
    return build_with(compilation, log, last=True)


def _proto(model: Any, capacity: int) -> tuple[Any, str]:
    if isinstance(model, str | os.PathLike):
        from mlc.frontend.onnx_file import read_model

        return read_model(Path(model)), Path(model).stem
    if hasattr(model, "SerializeToString"):
        return model, model.graph.name or "model"
    if hasattr(model, "state_dict"):
        from mlc.frontend.torch_past import export_decoder

        return export_decoder(model, capacity), type(model).__name__
    raise UsageError("a generator is made of a path, an onnx.ModelProto, a language model of transformers or an "
                     f"Executable, got {type(model).__name__}")


def _check_room(compilation: Compilation, capacity: int) -> None:
    """Raise :class:`UsageError` where the state of a compiled model needs more memory than there is."""
    import psutil

    states = [spec for spec in compilation.model.inputs if spec.name in compilation.model.states]
    sizes = (prod(size for size in spec.shape if isinstance(size, int)) * spec.itemsize for spec in states)
    token, free = sum(sizes), int(psutil.virtual_memory().available)
    if token * capacity > free:
        raise UsageError(f"the keys and values of {capacity} tokens must fit into memory, but take "
                         f"{token * capacity / 1e9:.1f} GB of {free / 1e9:.1f} that are free; give a smaller capacity, "
                         f"such as capacity={max(free // token // 2, 1)}")


def _capacity(model: Any) -> int:
    """The most tokens that the model's configuration says."""
    known = [size for size in _configured(model, _CAPACITIES) if isinstance(size, int) and size > 0]
    if not known:
        raise UsageError("how many tokens a generator holds must be known, but no configuration says so; give it as "
                         "capacity=1024")
    return known[0]


def _ends(model: Any) -> list[int]:
    """The tokens by which a text ends, one or several, as the model's configuration says."""
    for found in _configured(model, _ENDS):
        ends = found if isinstance(found, list | tuple) else [found]
        if ends and all(isinstance(each, int) and not isinstance(each, bool) for each in ends):
            return list(ends)
    return []


def _turn(model: Any) -> int | None:
    """The number of tokens beyond which a module turns keys by other angles, if it does."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    angles = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if angles.get("rope_type", angles.get("type")) != "longrope":
        return None
    found = angles.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(found) if found else None


def _configured(model: Any, names: Sequence[str]) -> Iterator[Any]:
    """What the model's configurations say by any of these names: those of a module, or of files beside its own."""
    if isinstance(model, str | os.PathLike):
        for file in _FILES:
            try:
                text = json.loads(Path(model).with_name(file).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(text, dict):
                for part in (text, text.get("model"), text.get("text_config")):
                    yield from (part[name] for name in names if isinstance(part, dict) and name in part)
    for attribute in _ATTRIBUTES:
        config = getattr(model, attribute, None)
        for part in (config, getattr(config, "text_config", None)):
            yield from (value for name in names if (value := getattr(part, name, None)) is not None)
