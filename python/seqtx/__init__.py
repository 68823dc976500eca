"""seqtx: long-context sequence models in C, from Python.

    import seqtx

    with seqtx.open("run.safetensors") as model:        # a checkpoint of any trainer
        print(model.score("To be or not to be").bits_per_byte)
        print(model.generate("The ", 200, temperature=0.7, seed=1))

    model = seqtx.AttnSpan(vocab=256, layers=2, dim=64, heads=4, span=64, adapt_span=1)
    optim = seqtx.Optim(model, "adam", clip=1.0)
    memory = model.memory(batch=1)
    for inputs, targets in batches:                     # token ids of shape (1,T)
        loss = model.loss(inputs, targets, memory)
        loss.backward()
        optim.step(lr=0.003)
    model.params["layers.0.attn.wq"]                    # a numpy array, without a copy

Errors of the library are exceptions with its text (seqtx.Error). All other functions of
the C headers are in seqtx.lib. docs/python.md of the sources has more examples.
"""
import os
from typing import Any, Dict, Optional, Union

from ._context import lib
from ._errors import ArgumentError, Error, FileError, FormatError, OutOfMemoryError
from ._model import (AttnSpan, Compressive, Generator, Loss, Memory, Model, Optim, Par, Schedule,
                     Score, Sru)
from ._vocab import Vocab

__all__ = ["ArgumentError", "AttnSpan", "Compressive", "Error", "FileError", "FormatError",
           "Generator", "Loss", "Memory", "Model", "Optim", "OutOfMemoryError", "Par", "Schedule",
           "Score", "Sru", "Vocab", "lib", "open"]

__version__: str = lib.stx_version().decode()


def open(path: "Union[str, os.PathLike[str]]", *, precision: Optional[str] = None,
         threads: int = 0, seed: int = 0, max_bytes: int = 0) -> Model:
    """Opens a checkpoint of train_attn_span, train_sru, train_compressive or train_par.
    Returns an AttnSpan, Sru, Compressive or Par, with the vocabulary of the checkpoint.
    precision = None: that of the run."""
    options: Dict[str, Any] = {"threads": threads, "seed": seed, "max_bytes": max_bytes}
    return Model._open(path, precision, **options)
