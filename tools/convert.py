#!/usr/bin/env python3
"""convert.py - converts checkpoints of other programs to those of the trainers here, and
back

    tools/convert.py IN OUT [--to FORMAT] [--from FORMAT] [--heads N ..]

IN is recognised by the names it contains. If the shapes do not determine the model, the
error names the option to give. docs/convert.md contains an example and the table of names
of each format. Needs Python 3 with numpy, and torch for .pt files. If IN cannot be
converted, prints one line, writes no OUT and exits with 2.

Structure. A model is a list of Rows. A Row names tensors of the original with their
shapes, tensors of seqtx, and a function for each direction: the same list reads, writes
and checks. Each kind of model has a function that makes the list from the sizes of the
model, one that finds the sizes in an original, and one that finds them in a checkpoint of
seqtx.
"""
import argparse
import inspect
import json
import math
import os
import pickle
import re
import struct
import sys
import tempfile
import zipfile
from collections import OrderedDict

try:
    import numpy as np
except ImportError:         # not needed by --help; run() reports it
    np = None


class Refuse(Exception):
    """An error message that ends the program with exit code 2."""


# >>safetensors --------------------------------------------------------------------------

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1",
          "BF16": "<u2", "BOOL": "|b1", "I8": "|i1", "I16": "<i2", "U16": "<u2", "U32": "<u4",
          "U64": "<u8"}
MASK = (1 << 64) - 1


def read_safetensors(path):
    """Returns ({name: array}, {key: text}) of a safetensors file."""
    with open(path, "rb") as f:
        data = f.read()
    try:
        (n,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + n].decode())
        meta = header.pop("__metadata__", {})
        tensors, end = OrderedDict(), 8 + n
        for name, h in header.items():
            a, b = (8 + n + x for x in h["data_offsets"])
            if b > len(data):
                raise Refuse(f"{path} is cut short: {name} ends after the end of the file")
            if isinstance(h["dtype"], str) and h["dtype"] not in DTYPES:
                raise Refuse(f"{path}: {name} has the type {h['dtype']}, which numpy lacks: store "
                             "it as F32")
            array = np.frombuffer(data[a:b], dtype=DTYPES[h["dtype"]]).reshape(h["shape"])
            if h["dtype"] == "BF16":
                array = (array.astype("<u4") << 16).view("<f4")
            tensors[name] = array
            end = max(end, b)
        if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
            raise ValueError("its metadata are no texts")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as e:
        raise Refuse(f"{path} is no safetensors file, or is damaged ({e})") from None
    if end != len(data):
        raise Refuse(f"{path} is damaged: {len(data)} bytes where its header requires {end}")
    return tensors, meta


def hash_bytes(h, data):
    """stx__hash of seqtx.h, of a text or of a tensor's data, eight bytes at a time."""
    whole = len(data) // 8 * 8
    for v in memoryview(data)[:whole].cast("Q"):
        h = ((h ^ v) * 0x9E3779B97F4A7C15) & MASK
        h ^= h >> 32
    if whole < len(data):           # the last bytes, padded with their count
        rest = bytes(data[whole:])
        v = int.from_bytes(rest + struct.pack("<Q", len(rest))[len(rest):], "little")
        h = ((h ^ v) * 0x9E3779B97F4A7C15) & MASK
        h ^= h >> 32
    return h


def hash_text(key, value):
    return hash_bytes(hash_bytes(7, key.encode() + b"\0"), value.encode() + b"\0")


def checksum(tensors, meta):
    """The checksum "seal" of stx_file_verify: a sum, independent of the order of
    tensors."""
    total = 0
    for name, a in tensors.items():
        h = hash_bytes((5 if a.dtype == np.uint8 else 0) * 16 + a.ndim + 1, name.encode() + b"\0")
        for n in a.shape:
            h = hash_bytes(h, struct.pack("<Q", n))
        total += hash_bytes(h, a.tobytes())
    for key, value in meta.items():
        total += hash_text(key, value)
    return total & MASK


def write_whole(path, put):
    """Calls put(file) on a temporary file, which then replaces path, so that path is
    never incomplete."""
    write_together([(path, put)])


def write_together(files):
    """The same for several files, [(path, put)]: none is replaced before all are
    written."""
    made = []
    try:
        for path, put in files:
            stem = os.path.basename(path)[:40]      # a temporary name must not be too long
            fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=stem + ".")
            made.append(temporary)
            with os.fdopen(fd, "wb") as f:
                put(f)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            if os.path.isdir(path):
                raise Refuse(f"cannot write {path}: it is a directory")
        for temporary, (path, _) in zip(made, files):
            os.replace(temporary, path)
    except OSError as e:
        raise Refuse(f"cannot write {path}: {e.strerror or e}") from None
    finally:
        for temporary in made:
            if os.path.exists(temporary):
                os.unlink(temporary)


def write_safetensors(path, tensors, meta):
    """Writes float32 and byte tensors with their checksum. float32 comes first, to be
    aligned."""
    meta = OrderedDict(meta)
    meta["seal"] = str(checksum(tensors, meta))
    header, at = OrderedDict(__metadata__=meta), 0
    arrays = sorted(tensors.items(), key=lambda item: item[1].dtype == np.uint8)
    for name, a in arrays:
        header[name] = {"dtype": "U8" if a.dtype == np.uint8 else "F32", "shape": list(a.shape),
                        "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def put(f):
        f.write(struct.pack("<Q", len(text)))
        f.write(text)
        for _, a in arrays:
            f.write(a.tobytes())
    write_whole(path, put)


# >>pickles ------------------------------------------------------------------------------

EXPORT = ("that is an object, not a tensor: in the program that made it, save the tensors alone, "
          "torch.save(torch.load('model.pt').state_dict(), 'state.pt') of a whole model, "
          "torch.save(torch.load('model.pt')['model'], 'state.pt') of a dictionary, "
          "and convert that")


def import_torch():
    try:
        import torch
        return torch
    except ImportError:
        raise Refuse(".pt files need torch: pip install torch, "
                     "or run this with a Python that has it") from None


def plain_pickles(torch):
    """A pickle_module for torch.load that can make tensors and dictionaries only."""
    allowed = {("collections", "OrderedDict"), ("torch", "Size"),
               ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2"),
               ("torch._utils", "_rebuild_parameter")}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if (module,
                name) not in allowed and not (module == "torch" and name.endswith("Storage")):
                raise pickle.UnpicklingError(f"unsupported global {module}.{name}")
            return super().find_class(module, name)

    class Module:
        pass
    Module.Unpickler = Unpickler
    Module.load = staticmethod(lambda f, **more: Unpickler(f, **more).load())
    Module.__name__ = "pickle"
    return Module


def stored_only(path):
    """Refuses a zip archive whose members are compressed or overlap. torch.save only
    stores them, and a small file could expand to many gigabytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return                      # another format, or damaged: torch reports which
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise Refuse(f"{path} is a compressed archive, and torch.save writes none: unpack it, "
                     "and pack it again without compression (zip -0)")
    if sum(part.file_size for part in parts) > os.path.getsize(path):
        raise Refuse(f"{path} is damaged: the parts of its archive overlap")


def read_pickle(path):
    torch = import_torch()
    if "weights_only" not in inspect.signature(torch.load).parameters:
        raise Refuse("torch before 1.13 has no weights_only, and a pickle may run any program: "
                     "use a newer version")
    stored_only(path)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            if "Unsupported operand" not in str(e):
                raise
            # weights_only of torch 1.13 does not accept a float
            return torch.load(path, map_location="cpu", weights_only=False,
                              pickle_module=plain_pickles(torch))
    except Exception as e:          # torch has no exception class for a file of another format
        text = str(e)
        if isinstance(e, OSError):
            raise Refuse(f"cannot read {path}: {e.strerror or e}") from None
        found = re.search(r"[Uu]nsupported (?:global|class):? *(?:GLOBAL )?([\w.]+)", text)
        if found:
            raise Refuse(f"{path} has a {found.group(1)}: {EXPORT}") from None
        raise Refuse(f"{path} is not a file of torch.save, is damaged or is cut short "
                     f"({text.splitlines()[0][:120] if text else type(e).__name__})") from None


def write_pickle(path, value):
    torch = import_torch()
    write_whole(path, lambda f: torch.save(value, f))


def state_dict_of(path, value):
    """The dictionary of tensors in a saved object: itself, or its value under a usual
    key."""
    torch = import_torch()
    for _ in range(3):
        if not isinstance(value, dict):
            raise Refuse(f"{path} has no dictionary of tensors, but a {type(value).__name__}: "
                         f"{EXPORT}")
        if value and all(isinstance(v, torch.Tensor) for v in value.values()):
            break
        inner = [k for k in ("model", "state_dict", "model_state_dict", "model_state")
                 if isinstance(value.get(k), dict)]
        if not inner:
            raise Refuse(f"{path} has no dictionary of tensors, but a {type(value).__name__}: "
                         f"{EXPORT}")
        value = value[inner[0]]
    out = OrderedDict()
    for name, t in value.items():
        if not isinstance(t, torch.Tensor):
            raise Refuse(f"{path}: {name} is no tensor but a {type(t).__name__}")
        if t.numel() * t.element_size() > os.path.getsize(path):
            raise Refuse(f"{path} is damaged: {name} of shape {tuple(t.shape)} is larger than the "
                         "file")
        try:
            if t.dtype in (torch.float16, torch.bfloat16):
                t = t.float()       # all such values are float32 values, too
            out[name] = t.detach().cpu().contiguous().numpy()
        except (RuntimeError, TypeError) as e:      # out of memory, or a dtype that numpy lacks
            why = str(e).splitlines()[0][:120]
            raise Refuse(f"{path}: {name} cannot be read ({why})") from None
    return out


# >>tensorflow: checkpoints of objects, PREFIX.index and PREFIX.data-00000-of-00001 ------

# The index is a sorted table as LevelDB has it: blocks of (key, value), each with a byte
# for its compression and a checksum, then a block with the places of these, and a footer.
# A key is a variable's path; its value says type, shape, place and checksum in the data.
# A text among the variables, the graph of objects, says which variables belong to which
# object under which names.

TABLE_MAGIC = 0xdb4775248b80fb57
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
TYPES = {"float32": 1, "int64": 9}
TEXT = 7


def crc_tables():
    """Entry k: four tables, one per byte of a CRC-32C, that advance it over 2^k zero
    bytes."""
    byte = np.arange(256, dtype=np.uint32)
    first = byte
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ np.uint32(0x82F63B78), first >> 1)
    tables = [[first, byte, byte << 8, byte << 16]]
    for k in range(40):
        tables.append([crc_zeros(tables[k], t) for t in tables[k]])
    return tables


def crc_zeros(table, c):
    return table[0][c & 255] ^ table[1][c >> 8 & 255] ^ table[2][c >> 16 & 255] ^ table[3][c >> 24]


CRC = []        # the tables, made on first use


def crc32c(data):
    """CRC-32C of bytes, computed in parallel.

    A CRC is linear: that of two halves is that of the first half, advanced over zeros,
    xor that of the second. All pairs of words are thus combined at once, then all pairs
    of pairs.
    """
    if not CRC:
        CRC.extend(crc_tables())
    data, crc = np.frombuffer(data, np.uint8), np.array([0xFFFFFFFF], np.uint32)
    for at in range(0, len(data), 1 << 20):
        piece = data[at:at + (1 << 20)]
        # leading zeros do not change it
        words = np.concatenate([np.zeros(-len(piece) % 4, np.uint8), piece]).view("<u4")
        k = 2
        while len(words) > 1:
            if len(words) % 2:
                words = np.concatenate([words[:1] * 0, words])
            words = crc_zeros(CRC[k], words[::2]) ^ words[1::2]
            k += 1
        for k in range(len(piece).bit_length()):
            if len(piece) >> k & 1:
                crc = crc_zeros(CRC[k], crc)
        crc = crc ^ crc_zeros(CRC[2], words)
    return int(crc[0]) ^ 0xFFFFFFFF


def masked_crc(data):
    """A CRC as it is stored: masked, since a CRC of data with a CRC in it would be
    degenerate."""
    crc = crc32c(data)
    return (((crc >> 15 | crc << 17) & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def as_varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def fields(data):
    """Yields (number, value) of a protocol buffer's fields; a nested message is bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            if key & 7 == 2:
                size, at = varint(data, at)
            else:
                size = {1: 8, 5: 4}[key & 7]
            if at + size > len(data):
                raise IndexError("a field ends behind the end")
            value, at = data[at:at + size], at + size
        yield key >> 3, value


def field(number, value):
    """One field: an integer, which is omitted if it is 0, or bytes."""
    if isinstance(value, int):
        return as_varint(number << 3) + as_varint(value) if value else b""
    return as_varint(number << 3 | 2) + as_varint(len(value)) + value


def table_block(path, data, handle):
    """Yields (key, value) of a block of a sorted table at handle, which is two
    varints."""
    begin, at = varint(handle, 0)
    size, _ = varint(handle, at)
    if begin + size + 5 > len(data):
        raise IndexError("a block ends behind the end")
    if masked_crc(data[begin:begin + size + 1]) != data[begin + size + 1:begin + size + 5]:
        raise Refuse(f"{path} is damaged: its block at byte {begin} does not match its checksum; "
                     "use another copy")
    if data[begin + size]:
        raise Refuse(f"{path} is compressed, which TensorFlow's own are not")
    block, key, at = data[begin:begin + size], b"", 0
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    while at < end:
        shared, at = varint(block, at)
        more, at = varint(block, at)
        length, at = varint(block, at)
        key = key[:shared] + block[at:at + more]
        yield key, block[at + more:at + more + length]
        at += more + length


def block_of(entries):
    """Makes such a block: every 16th key is complete, the others share a prefix with the
    previous key."""
    body, last, restarts = b"", b"", [0]
    for i, (key, value) in enumerate(entries):
        shared = len(os.path.commonprefix([last, key])) if i % 16 else 0
        if i and not i % 16:
            restarts.append(len(body))
        lengths = shared, len(key) - shared, len(value)
        body += b"".join(as_varint(n) for n in lengths) + key[shared:] + value
        last = key
    return body + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def read_tensorflow(prefix):
    """{name: array} of the variables of `model`, without the optimiser and counters."""
    out, index_path, data_path = OrderedDict(), prefix + ".index", prefix + ".data-00000-of-00001"
    try:
        with open(index_path, "rb") as f:
            index = f.read()
        with open(data_path, "rb") as f:
            data = f.read()
    except OSError as e:
        raise Refuse(f"{e.filename}: {e.strerror}") from None
    try:
        footer = index[-48:]
        if len(footer) < 48 or int.from_bytes(footer[-8:], "little") != TABLE_MAGIC:
            raise Refuse(f"{index_path} is no index of a TensorFlow checkpoint, or is cut short")
        _, at = varint(footer, 0)
        _, at = varint(footer, at)
        for _, handle in table_block(index_path, index, footer[at:]):
            for key, value in table_block(index_path, index, handle):
                name = key.decode()
                own = name.startswith("model/") and name.endswith(VALUE)
                if not own or ".OPTIMIZER_SLOT" in name:
                    continue
                entry = dict(fields(value))
                shape = [dict(fields(dim)).get(1, 0) for n, dim in fields(entry.get(2, b""))
                         if n == 2]
                begin, size = entry.get(4, 0), entry.get(5, 0)
                if entry.get(1) != 1:
                    raise Refuse(f"{name}: expected type 1, which is float32, "
                                 f"got {entry.get(1)}")
                if begin + size > len(data) or entry.get(3, 0):
                    raise Refuse(f"{data_path} is cut short, or there are more such files: "
                                 f"{name} is not in it")
                numbers = data[begin:begin + size]
                if masked_crc(numbers) != entry.get(6, bytes(4)):  # a field that is 0 is omitted
                    raise Refuse(f"{data_path} is damaged: {name} does not match its checksum; "
                                 "use another copy")
                out[name[:-len(VALUE)]] = np.frombuffer(numbers, "<f4").reshape(shape)
    except (IndexError, KeyError, ValueError, TypeError) as e:
        raise Refuse(f"{index_path} is damaged ({e})") from None
    return out


def object_graph(names, aliases):
    """The bytes of the object graph (a TrackableObjectGraph).

    Node 0 is the root; a node has named children, and a variable its key. An object whose
    name has an alias is a child of its parent under both names.
    """
    children, paths = [{}], {}
    for name in names:
        at = 0
        for part in name.split("/"):
            if part not in children[at]:
                children[at][part] = len(children)
                children.append({})
            at = children[at][part]
        paths[at] = name
    out = b""
    for at, own in enumerate(children):
        own = dict(own, **{b: own[a] for a, b in aliases.items() if a in own})
        node = b"".join(field(1, field(1, child) + field(2, part.encode()))
                        for part, child in own.items())
        if at in paths:
            node += field(2, field(1, b"VARIABLE_VALUE") + field(2, paths[at].encode())
                          + field(3, (paths[at] + VALUE).encode()))
        out += field(1, node)
    return out


def write_tensorflow(prefix, variables, aliases):
    """Writes variables, {object path: array}, and `checkpoint`, which names the newest
    file of the directory."""
    graph = object_graph(variables, aliases)
    # A text is stored as its length, the length's checksum, and the text. The checksum of
    # the whole covers the length as four bytes.
    length = struct.pack("<I", len(graph))
    length, head = length + masked_crc(length), as_varint(len(graph)) + masked_crc(length)
    parts = {GRAPH: (TEXT, (), head + graph, masked_crc(length + graph))}
    for name, a in variables.items():
        numbers = a.astype(a.dtype.newbyteorder("<")).tobytes()
        parts[name + VALUE] = TYPES[a.dtype.name], a.shape, numbers, masked_crc(numbers)
    # one data file, little-endian, version 1
    entries, at = [(b"", field(1, 1) + field(3, field(1, 1)))], 0
    keys = sorted(parts, key=str.encode)
    for key in keys:
        kind, shape, numbers, crc = parts[key]
        dims = b"".join(field(2, field(1, n)) for n in shape)
        entries.append((key.encode(), field(1, kind) + field(2, dims) + field(4, at)
                        + field(5, len(numbers)) + b"\x35" + crc))
        at += len(numbers)
    index, handles, group = b"", [], []

    def put_block(entries):
        nonlocal index
        block = block_of(entries)
        handle = as_varint(len(index)) + as_varint(len(block))
        index += block + b"\0" + masked_crc(block + b"\0")
        return handle
    for entry in entries:
        group.append(entry)
        if sum(len(k) + len(v) for k, v in group) >= 4096 or entry is entries[-1]:
            handles.append((entry[0], put_block(group)))
            group = []
    footer = put_block([]) + put_block(handles)
    index += footer.ljust(40, b"\0") + struct.pack("<Q", TABLE_MAGIC)

    def put_data(f):
        for key in keys:
            f.write(parts[key][2])
    name = "".join(chr(c) if 32 <= c < 127 and c not in b"\"\\" else f"\\{c:03o}"
                   for c in os.fsencode(os.path.basename(prefix)))
    state = f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n'.encode()
    puts = put_data, lambda f: f.write(index), lambda f: f.write(state)
    write_together(list(zip(tensorflow_files(prefix), puts)))


def tensorflow_files(prefix):
    newest = os.path.join(os.path.dirname(prefix), "checkpoint")
    return prefix + ".data-00000-of-00001", prefix + ".index", newest


# >>vocabulary ---------------------------------------------------------------------------

KINDS = {"bytes": 0, "bytes-compact": 0, "chars": 1, "words": 2, "ids": 4}
ORDERS = ("first", "count", "count-later", "sorted")
EOS = b"<eos>"


def pieces_of_text(path, tokens, order, eos, eos_first, strip):
    """The distinct tokens of a text, as the trainers count them, in the original's order.
    eos: the end of a line is a token, also with characters."""
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as e:
        raise Refuse(f"--text {path}: {e.strerror}") from None
    if tokens == "bytes-compact":
        first = {v: data.find(bytes([v])) for v in range(256)}
        seen = [v for v in sorted(first, key=first.get) if first[v] >= 0]
        count = {v: data.count(bytes([v])) for v in seen}
        keys = {v: EOS if v == 10 else bytes([v]) for v in seen}
        if 10 not in keys:
            seen.append(10)
            keys[10], count[10] = EOS, 1
    else:
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise Refuse(f"--text {path}: not UTF-8 at byte {e.start}") from None
        text = text.strip() if strip else text
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if lines[-1] == "":
            lines.pop()
        count = {}
        for line in lines:
            for piece in (line if tokens == "chars" else line.split()):
                count[piece] = count.get(piece, 0) + 1
            if eos or tokens == "words":
                count[None] = count.get(None, 0) + 1
        seen = list(count)
        keys = {v: EOS if v is None else v.encode() for v in seen}
    if order == "sorted":
        seen.sort(key=lambda v: b"\n" if v in (None, 10) else keys[v])
    elif order != "first":
        seen = sorted(reversed(seen) if order == "count-later" else seen, key=lambda v: -count[v])
    out = [keys[v] for v in seen]
    if eos_first and EOS in out:
        out.remove(EOS)
        out.insert(0, EOS)
    return out


SCORED = re.compile(rb"(.*)\t[-+.0-9eE]*[0-9][-+.0-9eE]*\r?\Z", re.DOTALL)


def without_cr(line):
    """The line without the carriage return of a CRLF line end; a line that consists of one
    is a piece."""
    return line[:-1] if len(line) > 1 and line.endswith(b"\r") else line


def encoding_of(data):
    """The encoding of a list of pieces, if it is UTF-16 or UTF-32, as iconv names it: there
    is a byte-order mark, or every line feed has zero bytes next to it. Otherwise None."""
    for mark, name in ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
                       (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if data.startswith(mark):
            return name
    feeds = data.count(b"\n")
    for feed, name in ((b"\n\0\0\0", "UTF-32LE"), (b"\0\0\0\n", "UTF-32BE"),
                       (b"\n\0", "UTF-16LE"), (b"\0\n", "UTF-16BE")):
        if feeds and data.count(feed) == feeds:
            return name
    return None


def pieces_of_vocab(path, lines):
    """The pieces of a SentencePiece .vocab, as seqtx_text.h reads it. The score follows
    the last tab; a piece may contain tabs and newlines, and a newline inside it shows
    only where one side is empty."""
    if not lines or not SCORED.match(lines[-1]):
        return [without_cr(line.split(b"\t")[0]) for line in lines]
    pieces, rest = [], []
    for number, line in enumerate(lines):
        scored = SCORED.match(line)
        text = scored.group(1) if scored else line
        if rest and rest[-1] and text:
            raise Refuse(f"--vocab {path}: line {number} has no score after a tab, as the last "
                         "line has; give it one, as 0")
        rest.append(text)
        if scored:
            pieces.append(b"\n".join(rest))
            rest = []
    return pieces


def pieces_of_list(path, tokens, size, fairseq):
    """One piece per line; with bytes-compact, the value of a byte or <eos>. fairseq: a
    dict.txt."""
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as e:
        raise Refuse(f"--vocab {path}: {e.strerror}") from None
    encoding = encoding_of(data)
    if encoding:
        raise Refuse(f"--vocab {path} is {encoding}: convert it to UTF-8, for example with "
                     f"iconv -f {encoding} -t UTF-8")
    lines = data[3 if data.startswith(b"\xef\xbb\xbf") else 0:].split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if tokens != "ids":
        lines = [without_cr(line) for line in lines]
    if fairseq and tokens == "words":
        lines = [b"<s>", b"<pad>", EOS, b"<unk>"] + [line.rsplit(b" ", 1)[0] for line in lines]
        lines += [b"madeupword%04d" % i
                  for i in range(size - len(lines) if 0 < size - len(lines) < 8 else 0)]
    if tokens == "ids":
        return pieces_of_vocab(path, lines)
    if tokens != "bytes-compact":
        return lines
    try:
        return [EOS if line in (EOS, b"10") else bytes([int(line)]) for line in lines]
    except ValueError:
        raise Refuse(f"--vocab {path}: with --tokens bytes-compact a line is a byte's number, "
                     "0 to 255, or <eos>") from None


def vocab_blob(pieces, tokens):
    """The bytes that stx_vocab_save of seqtx_text.h writes."""
    eos = tokens != "ids" and EOS in pieces
    out = [b"STXV\1", bytes([KINDS[tokens], (tokens == "bytes-compact") | eos << 1, 0]),
           struct.pack("<Q", len(pieces))]
    for p in pieces:
        out += [struct.pack("<I", len(p)), p]
    if tokens == "ids":         # plain pieces only; no <eos>, no <unk>, no model
        out += [bytes(len(pieces)), struct.pack("<IIQ", 0, 0, 0)]
    return b"".join(out)


def vocabulary(o, size, order="first", eos=True, eos_first=False, strip=False, fairseq=False):
    """(blob, its options) for a model of `size` tokens. The other arguments say how the
    original numbers its tokens."""
    given, text, tokens = o.take("vocab"), o.take("text"), o.take("tokens")
    if given and text:
        raise Refuse("--vocab and --text: one of them only")
    if text:
        order = o.take("order", order)
    if given and given.endswith(".safetensors"):
        tensors, meta = read_safetensors(given)
        if "vocab" not in tensors or "config" not in meta:
            raise Refuse(f"--vocab {given} is a safetensors file, "
                         "but no checkpoint of these trainers")
        blob = tensors["vocab"]
        have = int(blob[8:16].view("<u8")[0]) if blob.size >= 16 else 0
        config = {k: v for k, v in config_of(given, meta).items()
                  if k in ("tokens", "pieces", "join-lines", "min-count")}
        if tokens and tokens != config.get("tokens"):
            raise Refuse(f"--tokens {tokens}: that of --vocab {given} is {config.get('tokens')}")
        return fitting(blob, have, size, given), config
    if not given and not text:
        if tokens not in (None, "bytes") or (tokens is None and size != 256):
            raise Refuse(f"the model has {size} tokens, and does not say which: "
                         "give --text TRAINING_TEXT with --tokens bytes-compact, chars or words, "
                         "or --vocab with a list of one piece per line, "
                         "or with a checkpoint of these trainers")
        tokens, pieces = "bytes", [bytes([i]) for i in range(256)]
    elif text:
        if tokens not in ("bytes-compact", "chars", "words"):
            raise Refuse("--text needs --tokens bytes-compact, chars or words: what a token is")
        pieces = pieces_of_text(text, tokens, order, eos, eos_first and tokens == "words", strip)
    else:
        if tokens not in ("bytes-compact", "chars", "words", "ids"):
            raise Refuse("--vocab needs --tokens bytes-compact, chars, words or ids: "
                         "what a token is")
        pieces = pieces_of_list(given, tokens, size, fairseq)
        if tokens in ("words", "bytes-compact") and EOS not in pieces:
            raise Refuse(f"--vocab {given}: with --tokens {tokens} it needs <eos>, "
                         "the end of a line")
        if len(set(pieces)) != len(pieces) or b"" in pieces:
            raise Refuse(f"--vocab {given}: a piece is empty, or occurs twice")
    blob = np.frombuffer(vocab_blob(pieces, tokens), np.uint8)
    return (fitting(blob, len(pieces), size, given or text or "--tokens bytes"),
            {"tokens": tokens, "pieces": None, "join-lines": False, "min-count": 0})


def fitting(blob, have, size, where):
    if have != size:
        raise Refuse(f"the model has {size} tokens, {where} has {have}")
    return blob


# >>rows: which row is which in both ------------------------------------------------------

class Row:
    """Tensors of the original and the tensors of seqtx that hold the same values.

    orig is a list of (name, shape), ours a list of names. forth and back each map a list
    of arrays to the other side's list. Tensors in `may` can be missing: forth gets None
    for them.
    """

    def __init__(self, orig, ours, forth=None, back=None, may=()):
        self.orig, self.ours, self.may = orig, ours, set(may)
        self.forth, self.back = forth or (lambda a: a), back or (lambda a: a)


def same(name, shape, ours):
    return Row([(name, shape)], [ours])


def reshaped(name, shape, ours, to):
    return Row([(name, shape)], [ours], lambda a: [a[0].reshape(to)],
               lambda a: [a[0].reshape(shape)])


def turned(name, shape, ours):
    return Row([(name, shape)], [ours], lambda a: [a[0].T], lambda a: [a[0].T])


def parts(name, shape, ours, at):
    """One tensor of the original, split by rows into several of ours."""
    return Row([(name, shape)], ours, lambda a: np.split(a[0], at), lambda a: [np.concatenate(a)])


def buffer(name, shape, value, may=()):
    """A stored tensor with a known value: ignored when read, recomputed when written."""
    return Row([(name, shape)], [], lambda a: [],
               lambda a: [np.asarray(value, np.float32).reshape(shape)], may)


def twice(first, second, shape, ours):
    """One tensor under two names, of which the second can be missing."""
    def forth(a):
        if a[1] is not None and not np.array_equal(a[0], a[1]):
            raise Refuse(f"{first} and {second} should be one tensor, and differ")
        return a[:1]
    return Row([(first, shape), (second, shape)], [ours], forth, lambda a: [a[0], a[0]], [second])


def words_of(names):
    return ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def checked(name, a, shape):
    if a.dtype != np.float32:
        raise Refuse(f"{name}: expected float32, got {a.dtype}")
    if shape is not None and tuple(a.shape) != tuple(shape):
        raise Refuse(f"{name}: expected shape {tuple(shape)}, got {tuple(a.shape)}")
    return a


def to_ours(rows, source):
    left, out = dict(source), OrderedDict()
    for row in rows:
        lost = [n for n, _ in row.orig if n not in left and n not in row.may]
        if lost:
            raise Refuse(f"it lacks {words_of(lost)}")
        got = [checked(n, left.pop(n), s) if n in left else None for n, s in row.orig]
        for name, a in zip(row.ours, row.forth(got)):
            out[name] = np.ascontiguousarray(a)
    if left:
        raise Refuse(f"names that are not known: {words_of(left)}")
    return out


STATE = ("optim.", "memory.", "state.", "arch.", "grads", "vocab")


def to_theirs(rows, source):
    wanted = {n for row in rows for n in row.ours}      # PAR's gates belong to the model
    left = {k: v for k, v in source.items() if k in wanted or not k.startswith(STATE)}
    out = OrderedDict()
    for row in rows:
        lost = [n for n in row.ours if n not in left]
        if lost:
            raise Refuse(f"it lacks {words_of(lost)}")
        try:
            made = row.back([checked(n, left.pop(n), None) for n in row.ours])
        except ValueError:
            raise Refuse(f"{words_of(row.ours)}: "
                         "the shape does not match the rest of the model") from None
        for (name, shape), a in zip(row.orig, made):
            # ascontiguousarray would give a scalar a dimension
            out[name] = np.asarray(checked(name, a, shape), order="C")
    if left:
        raise Refuse(f"names that are not known: {words_of(left)}")
    return out


def shape_of(tensors, name, ndim):
    if name not in tensors:
        raise Refuse(f"it lacks {name}")
    if tensors[name].ndim != ndim:
        raise Refuse(f"{name}: expected {ndim} dimensions, got {tensors[name].ndim}")
    return tensors[name].shape


def config_of(path, meta):
    try:
        config = json.loads(meta["config"])
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Refuse(f"{path} is damaged: its configuration is no JSON object")
    return config


def count_of(tensors, form):
    """The number of names form % 0, form % 1, .."""
    n = 0
    while form % n in tensors:
        n += 1
    return n


def ratio_of(widths):
    """The number whose powers divide the widths of the clusters."""
    first = [widths[0] / widths[1]] if len(widths) > 1 else []
    for g in [4.0] + first + [float(g) for g in range(2, 65)]:
        if g > 1 and all(math.floor(widths[0] / g ** i) == w for i, w in enumerate(widths)):
            return g
    raise Refuse(f"clusters are {', '.join(map(str, widths))} wide: "
                 "no number divides each into the next")


class Options:
    """The options of the command line. An option that was given but never used is an
    error."""

    def __init__(self, given):
        self.given, self.asked = given, set()

    def take(self, name, missing=None):
        self.asked.add(name)
        return self.given.get(name, missing)

    def need(self, name, what):
        value = self.take(name)
        if value is None:
            raise Refuse(f"--{name} is needed: {what}")
        return value

    def finish(self, kind):
        rest = sorted(set(self.given) - self.asked)
        if rest:
            raise Refuse(f"--{rest[0]} means nothing for {kind}")


def divides(o, name, whole, of):
    n = o.need(name, f"the number of attention heads, which divides {of} {whole}; "
               "the file does not say it")
    if n < 1 or whole % n:
        raise Refuse(f"--{name} {n} does not divide {of} {whole}")
    return n


# >>adaptive span ------------------------------------------------------------------------

def span_rows(s):
    d, H, D, L, N, f, V = s["d"], s["H"], s["D"], s["L"], s["N"], s["f"], s["V"]
    rows = [Row([("key_pe", (1, D, L))], ["key_pe"], lambda a: [a[0][0].T],
                lambda a: [a[0].T[None]])]
    if s["io"]:
        sizes, widths, tied = s["io"]
        for i, (n, w) in enumerate(zip(sizes, widths)):
            inside = [(f"in_emb.emb_layers.{i}.weight", f"out_emb.out_layers.{i}.weight", (n, w),
                       "tables"),
                      (f"in_emb.emb_projs.{i}", f"out_emb.out_projs.{i}", (d, w), "projs")]
            for a, b, shape, kind in inside:
                rows += [twice(a, b, shape, f"in_emb.{kind}.{i}")] if tied else [
                    same(a, shape, f"in_emb.{kind}.{i}"), same(b, shape, f"out_emb.{kind}.{i}")]
            rows += [same(f"out_emb.out_layers.{i}.bias", (n,), f"out_emb.biases.{i}")]
        if len(sizes) > 1:
            rows += [same("out_emb.cluster_proj.weight", (len(sizes) - 1, d),
                          "out_emb.cluster.weight"),
                     same("out_emb.cluster_proj.bias", (len(sizes) - 1,), "out_emb.cluster.bias")]
    else:
        rows += [same("in_emb.weight", (V, d), "in_emb.weight"),
                 same("out_emb.weight", (V, d), "out_emb.weight"),
                 same("out_emb.bias", (V,), "out_emb.bias")]
    for l in range(s["nl"]):
        a, p = f"layers.{l}.attn.attn.", f"layers.{l}."
        if s["adapt"]:
            z = (1,) if s["one"] else (H, 1, 1)
            names = [a + "adaptive_span._mask."]
            if N:
                names += [a + "persistent_memory.adaptive_span._mask."]

            def forth(got, names=names, count=1 if s["one"] else H, clip=s["clip"]):
                if len(got) > 1 and got[1] is not None and not np.array_equal(got[0], got[1]):
                    raise Refuse(f"{names[0]}current_val and {names[1]}current_val should be one "
                                 "tensor, and differ")
                return [np.clip(got[0], 0, 1).reshape(count) if clip else got[0].reshape(count)]
            rows += [Row([(n + "current_val", z) for n in names], [p + "attn.span"], forth,
                         lambda got, z=z, k=len(names): [got[0].reshape(z)] * k,
                         [n + "current_val" for n in names[1:]])]
            rows += [buffer(n + "mask_template", (L,), np.arange(1 - L, 1), [n + "mask_template"])
                     for n in names]
        if N:
            rows += [Row([(a + "persistent_memory.key", (H, D, N))], [p + "attn.pers_key"],
                         lambda x: [x[0].transpose(0, 2, 1)], lambda x: [x[0].transpose(0, 2, 1)]),
                     same(a + "persistent_memory.val", (H, N, D), p + "attn.pers_val")]
        rows += [same(f"{p}attn.proj_{name}.weight", (d, d), f"{p}attn.{w}")
                 for name, w in (("query", "wq"), ("out", "wo"), ("val", "wv"), ("key", "wk"))]
        for norm in ("norm1",) if N else ("norm1", "norm2"):
            rows += [same(f"{p}{norm}.{w}", (d,), f"{p}{norm}.{w}") for w in ("weight", "bias")]
        if not N:
            rows += [same(f"{p}ff.{n}", shape, f"{p}ff.{n}")
                     for n, shape in (("fc1.weight", (f, d)), ("fc1.bias", (f,)),
                                      ("fc2.weight", (d, f)), ("fc2.bias", (d,)))]
    return rows


def span_in(t, o, fairseq):
    _, D, L = shape_of(t, "key_pe", 3)
    d = shape_of(t, "layers.0.attn.proj_query.weight", 2)[0]
    a = "layers.0.attn.attn."
    s = {"D": D, "L": L, "d": d, "H": d // D, "nl": count_of(t, "layers.%d.attn.proj_query.weight"),
         "N": 0, "f": 1, "io": None, "V": 0, "adapt": a + "adaptive_span._mask.current_val" in t,
         "clip": fairseq}
    if d % D:
        raise Refuse(f"key_pe has heads of {D}, which do not divide the hidden size {d}")
    s["one"] = s["adapt"] and fairseq and t[a + "adaptive_span._mask.current_val"].ndim == 1
    heads = o.take("heads")
    if heads is not None and heads != s["H"]:
        raise Refuse(f"--heads {heads}: it has {s['H']}")
    if a + "persistent_memory.key" in t:
        s["N"] = shape_of(t, a + "persistent_memory.key", 3)[2]
    else:
        s["f"] = shape_of(t, "layers.0.ff.fc1.weight", 2)[0]
    config = {"nlayers": s["nl"], "hid-sz": d, "inner-hid-sz": s["f"], "nheads": s["H"],
              "attn-span": L, "pers-mem-size": s["N"], "adapt-span": s["adapt"],
              "adapt-span-ramp": o.take("ramp", 32) if s["adapt"] else 32, "adapt-span-cache": True,
              "span-per-layer": s["one"], "no-renorm": fairseq,
              "literal": not o.take("corrected", False), "adapt-io": False, "adapt-io-tied": False,
              "adapt-io-divval": 4, "adapt-io-cutoffs": None}
    if "in_emb.weight" in t:
        s["V"] = shape_of(t, "in_emb.weight", 2)[0]
    else:
        k = count_of(t, "in_emb.emb_layers.%d.weight")
        shapes = [shape_of(t, f"in_emb.emb_layers.{i}.weight", 2) for i in range(k)]
        if not k:
            raise Refuse("it lacks in_emb.weight and in_emb.emb_layers.0.weight")
        sizes, widths = [x[0] for x in shapes], [x[1] for x in shapes]
        pairs = [(f"in_emb.emb_layers.{i}.weight", f"out_emb.out_layers.{i}.weight")
                 for i in range(k)]
        pairs += [(f"in_emb.emb_projs.{i}", f"out_emb.out_projs.{i}") for i in range(k)]
        tied = all(b not in t or (a in t and np.array_equal(t[a], t[b])) for a, b in pairs)
        s["io"], s["V"] = (sizes, widths, tied), sum(sizes)
        config.update({"adapt-io": True, "adapt-io-tied": tied, "adapt-io-divval": ratio_of(widths),
                       "adapt-io-cutoffs": ",".join(str(sum(sizes[:i])) for i in range(1, k))})
        if k == 1:
            raise Refuse("an adaptive input of one cluster is a plain one with a projection, "
                         "which the trainer does not support")
    config["block-sz"] = o.take("block-sz", 512)
    blob, words = vocabulary(o, s["V"], "count-later" if s["io"] else "first", strip=True,
                             fairseq=fairseq)
    config.update(words)
    return "seqtx.attn_span.1", span_rows(s), config, blob


def span_out(c, t, fairseq):
    L, D = shape_of(t, "key_pe", 2)
    s = {"D": D, "L": L, "d": c["hid-sz"], "H": c["nheads"], "nl": c["nlayers"],
         "N": c["pers-mem-size"], "f": c["inner-hid-sz"], "io": None, "V": 0,
         "adapt": c["adapt-span"], "one": c["span-per-layer"], "clip": False}
    if c["no-renorm"] != fairseq:
        raise Refuse("--to fairseq-span is for models with --no-renorm, --to attn-span for those "
                     "without: they are different models, and their weights do not carry over")
    if c["adapt-io"]:
        k = count_of(t, "in_emb.tables.%d")
        shapes = [shape_of(t, f"in_emb.tables.{i}", 2) for i in range(k)]
        s["io"] = ([x[0] for x in shapes], [x[1] for x in shapes], c["adapt-io-tied"])
    else:
        s["V"] = shape_of(t, "in_emb.weight", 2)[0]
    if fairseq and (s["N"] or s["io"] or not s["adapt"]):
        raise Refuse("--to fairseq-span: fairseq's has an adaptive span, "
                     "no persistent vectors and no adaptive input")
    return span_rows(s)


# >>sru ----------------------------------------------------------------------------------

def planes(k, O):
    """Their rows (s H + j) k + i are our rows i O + s H + j."""
    def forth(w):
        return w.reshape(O, k, w.shape[1]).transpose(1, 0, 2).reshape(k * O, w.shape[1])

    def back(w):
        return w.reshape(k, O, w.shape[1]).transpose(1, 0, 2).reshape(O * k, w.shape[1])
    return forth, back


def sru_rows(s):
    """s: layout (2.6, 3.0 or ++), prefix, O, layers (I, P, k, attends, LN in the
    transform), first, norm, scale, V, E, io."""
    O, rows, pre = s["O"], [], s["prefix"]
    if s["io"]:
        sizes, widths, shared = s["io"]
        K = len(sizes) - 1
        for i, (n, w) in enumerate(zip(sizes, widths)):
            a = f"output_layer.out_layers.{i}."
            # the last K rows of their head are the other clusters, in our order
            if i == 0:
                rows += [parts(a + "weight", (n + K, w),
                               ["out_emb.tables.0", "out_emb.cluster.weight"], [n]),
                         parts(a + "bias", (n + K,),
                               ["out_emb.biases.0", "out_emb.cluster.bias"], [n])]
            else:
                rows += [same(a + "weight", (n, w), f"out_emb.tables.{i}"),
                         same(a + "bias", (n,), f"out_emb.biases.{i}")]
            p, e = f"output_layer.out_projs.{i}", f"embedding_layer.emb_projs.{i}"
            rows += [twice(p, e, (O, w), f"out_emb.projs.{i}")] if shared else [
                same(p, (O, w), f"out_emb.projs.{i}"), same(e, (O, w), f"in_emb.projs.{i}")]
    elif s["V"]:
        rows += [same("embedding_layer.weight", (s["V"], s["E"]), "in_emb.weight"),
                 same("output_layer.weight", (s["V"], O), "out_emb.weight"),
                 same("output_layer.bias", (s["V"],), "out_emb.bias")]
    if s["first"]:
        rows += [same(pre + "input_to_hidden.weight", (O, s["first"]), "input.weight")]
    for l, (I, P, k, attends, ln) in enumerate(s["layers"]):
        a, q = f"{pre}rnn_lst.{l}.", f"layers.{l}."
        m = a + "transform_module."
        forth, back = planes(k, O)
        if s["layout"] == "2.6":
            if P:
                rows += [turned(a + "weight_proj", (I, P), q + "w1")]
            rows += [Row([(a + "weight", (P or I, O * k))], [q + "w3"],
                         lambda x, f=forth: [f(x[0].T)], lambda x, b=back: [b(x[0]).T])]
        else:
            names = {"3.0": ("0.weight", "1.weight") if P else ("", "weight"),
                     "++": ("linear1.weight", "linear3.weight"
                            if attends else "linear2.weight")}[s["layout"]]
            if P:
                rows += [same(m + names[0], (P, I), q + "w1")]
            if attends:
                rows += [same(m + "linear2.weight", (2 * P, P), q + "w2"),
                         same(m + "alpha", (1,), q + "alpha")]
            if ln:
                rows += [same(f"{m}layer_norm.{w}", (P,), f"{q}attn_norm.{w}")
                         for w in ("weight", "bias")]
            rows += [Row([(m + names[1], (O * k, P or I))], [q + "w3"],
                         lambda x, f=forth: [f(x[0])], lambda x, b=back: [b(x[0])])]
        rows += [reshaped(a + "weight_c", (2 * O,), q + "v", (2, O)),
                 reshaped(a + "bias", (2 * O,), q + "bias", (2, O)),
                 buffer(a + "scale_x", (1,), s["scale"], [a + "scale_x"])]
        if s["norm"] != "none":
            n = I if s["norm"] == "before" else O
            rows += [same(f"{a}layer_norm.{w}", (n,), f"{q}norm.{w}") for w in ("weight", "bias")]
    return rows


def sru_layer(t, a, layout, O):
    """(I, P, k, attends, LN in the transform) of the layer whose names begin with a."""
    m = a + "transform_module."
    if layout == "2.6":
        fan, cols = shape_of(t, a + "weight", 2)
        I, P = shape_of(t, a + "weight_proj", 2) if a + "weight_proj" in t else (fan, 0)
    elif layout == "3.0":
        if m + "0.weight" in t:
            (P, I), cols = shape_of(t, m + "0.weight", 2), shape_of(t, m + "1.weight", 2)[0]
        else:
            (cols, I), P = shape_of(t, m + "weight", 2), 0
    else:
        P, I = shape_of(t, m + "linear1.weight", 2)
        attends = m + "linear3.weight" in t
        cols = shape_of(t, m + ("linear3.weight" if attends else "linear2.weight"), 2)[0]
    if cols not in (3 * O, 4 * O):
        raise Refuse(f"layer {a}: expected 3 or 4 times the {O} rows of its bias, got {cols}")
    plus = layout == "++"
    return I, P, cols // O, plus and attends, plus and m + "layer_norm.weight" in t


def attention_options(attends):
    """--attention, --attention-every and --attention-last for the layers that attend."""
    n = len(attends)
    if not any(attends):
        return False, 0, 0
    if all(attends):
        return True, 0, 0
    for every in range(2, n + 1):
        if attends == [(i + 1) % every == 0 for i in range(n)]:
            return True, every, 0
    if attends == sorted(attends):
        return True, 0, sum(attends)
    which = ", ".join(str(i + 1) for i in range(n) if attends[i])
    raise Refuse(f"layers {which} attend: neither every n-th layer nor the last ones, "
                 "the only forms of the trainer")


def sru_norm(o, n, I, O):
    """Where the LayerNorm of n features is in a cell of I inputs and O outputs."""
    known = None
    if I != O and n in (I, O):
        known = "before" if n == I else "after"
    norm = o.take("norm", known)
    if norm is None:
        o.need("norm", "before the transform or after the recurrence: the file does not say "
               "where the layer norm of a cell is (SRU's own default is before)")
    if known and norm != known:
        raise Refuse(f"--norm {norm}: its width says {known}")
    return norm


def sru_skip(o, layers, O):
    """Whether there is a highway: a layer of another width than its input shows it."""
    wide = {x[2] == 4 for x in layers if x[0] != O}
    if len(wide) > 1 or any(x[2] == 4 and x[0] == O for x in layers):
        raise Refuse("some layers have four sub-matrices, others three")
    return wide.pop() if wide else not o.take("no-skip", False)


def check_sru_widths(s, P):
    """Refuses layers that do not fit together, or whose projections the trainer cannot have."""
    O = s["O"]
    for l, x in enumerate(s["layers"]):
        I = O if l or s["first"] else x[0]
        if x[0] != I:
            raise Refuse(f"layer {l} has {x[0]} inputs, the previous one {O} outputs")
        if s["layout"] != "++" and x[1] != (P if P < x[0] and P < O else 0):
            how = f"by a projection to {x[1]}" if x[1] else "without a projection"
            raise Refuse(f"layer {l}: {x[0]} to {O} {how}: the trainer has one in every layer "
                         "where it is narrower than both, and only there")


def sru_in(t, o, layout):
    pre = "rnn." if any(k.startswith("rnn.rnn_lst.") for k in t) else ""
    nl = count_of(t, pre + "rnn_lst.%d.bias")
    if not nl:
        raise Refuse(f"it lacks {pre}rnn_lst.0.bias")
    O = shape_of(t, pre + "rnn_lst.0.bias", 1)[0] // 2
    custom = [k for k in t if ".custom_m." in k]
    if custom:
        raise Refuse(f"{custom[0]}: a custom transform is not supported")
    layers = [sru_layer(t, f"{pre}rnn_lst.{l}.", layout, O) for l in range(nl)]
    s = {"layout": layout, "prefix": pre, "O": O, "layers": layers, "first": 0, "norm": "none",
         "scale": 1.0, "V": 0, "E": O, "io": None}
    if pre + "input_to_hidden.weight" in t:
        s["first"] = shape_of(t, pre + "input_to_hidden.weight", 2)[1]
    if f"{pre}rnn_lst.0.layer_norm.weight" in t:
        n = shape_of(t, f"{pre}rnn_lst.0.layer_norm.weight", 1)[0]
        s["norm"] = sru_norm(o, n, layers[0][0], O)
    scales = [float(t[k][0]) for k in t if k.endswith(".scale_x") and t[k].shape == (1,)]
    if scales and any(x != scales[0] for x in scales):
        raise Refuse("scale_x differs from layer to layer")
    s["scale"] = scales[0] if scales else 1.0
    if s["scale"] < 1:
        raise Refuse(f"expected a scale_x of 1 or more, got {s['scale']}")
    skip = sru_skip(o, layers, O)
    widths = sorted({x[1] for x in layers if x[1]})
    if len(widths) > 1:
        raise Refuse(f"projections are {', '.join(map(str, widths))} wide: "
                     "the trainer has one width for all")
    P = widths[0] if widths else 0
    check_sru_widths(s, P)
    attention, every, last = attention_options([x[3] for x in layers])
    heads = divides(o, "heads", P, "the projection's width") if attention else 1
    # their memory is not normalised
    literal = attention and s["norm"] == "before" and not o.take("corrected", False)
    if layout == "++" and len({x[4] for x in layers}) > 1:
        raise Refuse("some layers have a layer norm in the transform, others have none")
    config = {"cell": "sru++" if layout == "++" else "sru", "nlayers": nl, "hid-sz": O,
              "emb-sz": s["first"] or layers[0][0], "proj-sz": P, "skip": skip,
              "highway-bias": math.log((s["scale"] ** 2 - 1) / 2) if s["scale"] > 1 else 0,
              "rescale": s["scale"] > 1, "tanh": o.take("tanh", False), "v1": False,
              "norm": s["norm"], "input-first": bool(s["first"]), "literal": literal,
              "nheads": heads, "attention": attention, "attention-every": every,
              "attention-last": last, "attn-norm": layout == "++" and layers[0][4],
              "attn-norm-first": False, "tied": False, "adapt-io": False,
              "adapt-io-separate": False, "adapt-io-divval": 4, "adapt-io-cutoffs": None}
    k = count_of(t, "output_layer.out_layers.%d.weight")
    if k:
        shapes = [shape_of(t, f"output_layer.out_layers.{i}.weight", 2) for i in range(k)]
        sizes, w = [x[0] for x in shapes], [x[1] for x in shapes]
        sizes[0] -= k - 1
        pairs = [(f"output_layer.out_projs.{i}", f"embedding_layer.emb_projs.{i}")
                 for i in range(k)]
        shared = all(b not in t or (a in t and np.array_equal(t[a], t[b])) for a, b in pairs)
        s["io"], s["V"] = (sizes, w, shared), sum(sizes)
        if k == 1:
            raise Refuse("an adaptive softmax of one cluster: the trainer has none")
        config.update({"adapt-io": True, "adapt-io-separate": not shared,
                       "adapt-io-divval": ratio_of(w), "emb-sz": w[0],
                       "adapt-io-cutoffs": ",".join(str(sum(sizes[:i])) for i in range(1, k))})
    elif "embedding_layer.weight" in t:
        s["V"], s["E"] = shape_of(t, "embedding_layer.weight", 2)
    if not s["V"]:
        return "seqtx.sru.stack.1", sru_rows(s), config, None
    config["block-sz"] = o.take("block-sz", 512)
    config["eval-unroll"] = config["block-sz"]
    blob, words = vocabulary(o, s["V"], "count" if s["io"] else "sorted", eos_first=True)
    config.update(words)
    return "seqtx.sru.1", sru_rows(s), config, blob


def sru_out(c, t, layout, stack):
    O, nl = c["hid-sz"], c["nlayers"]
    layers = []
    if (layout == "++") != (c["cell"] == "sru++"):
        raise Refuse(f"--to {'sru++' if layout == '++' else 'sru-' + layout}: "
                     f"the checkpoint's --cell is {c['cell']}")
    if c["v1"] or c["tied"] or c["attn-norm-first"]:
        raise Refuse("the original's files have no place for --v1, --tied or --attn-norm-first")
    for l in range(nl):
        q = f"layers.{l}."
        rows, fan = shape_of(t, q + "w3", 2)
        P, I = shape_of(t, q + "w1", 2) if q + "w1" in t else (0, fan)
        layers.append((I, P, rows // O, q + "w2" in t, q + "attn_norm.weight" in t))
    scale = math.sqrt(1 + 2 * math.exp(c["highway-bias"])) if c["rescale"] and c["skip"] else 1.0
    s = {"layout": layout, "prefix": "" if stack else "rnn.", "O": O, "layers": layers,
         "norm": c["norm"], "scale": scale, "V": 0, "E": O, "io": None,
         "first": shape_of(t, "input.weight", 2)[1] if "input.weight" in t else 0}
    if c["adapt-io"]:
        k = count_of(t, "out_emb.tables.%d")
        shapes = [shape_of(t, f"out_emb.tables.{i}", 2) for i in range(k)]
        s["io"] = ([x[0] for x in shapes], [x[1] for x in shapes], not c["adapt-io-separate"])
    elif not stack:
        s["V"], s["E"] = shape_of(t, "in_emb.weight", 2)
    return sru_rows(s)


# >>compressive --------------------------------------------------------------------------

def comp_rows(s):
    D, E, V, H, L, r, F, reach = s["D"], s["E"], s["V"], s["H"], s["L"], s["r"], s["F"], s["reach"]
    hd, kv, rows = D // H, s["kv"] * (D // H), []
    rows += [same("token_emb.weight", (V, E), "in_emb.weight")]
    if E != D:
        rows += [same("to_model_dim.weight", (D, E), "in_proj.weight"),
                 same("to_model_dim.bias", (D,), "in_proj.bias"),
                 same("to_logits.0.weight", (E, D), "out_proj.weight"),
                 same("to_logits.0.bias", (E,), "out_proj.bias")]
    last = "to_logits." if s["flat"] else "to_logits.1."
    rows += [same(last + "weight", (V, E), "out_emb.weight"),
             same(last + "bias", (V,), "out_emb.bias")]
    rows += [Row([("pos_emb", (H, reach, hd))], ["key_pe"],
                 lambda a: [a[0].transpose(1, 0, 2).reshape(reach, D)],
                 lambda a: [a[0].reshape(reach, H, hd).transpose(1, 0, 2)])]
    for l in range(L):
        for side in ("attn", "ff"):
            p, q = f"{side}_layers.{l}.", f"layers.{l}.{side}."
            rows += [same(f"{p}fn.norm.{w}", (D,), f"{q}norm.{w}") for w in ("weight", "bias")]
            if s["gru"]:
                tail = "_l0" if s["old_gru"] else ""
                rows += [same(f"{p}gru.{n}{tail}", shape, f"{q}gate.{n}")
                         for n, shape in (("weight_ih", (3 * D, D)), ("weight_hh", (3 * D, D)),
                                          ("bias_ih", (3 * D,)), ("bias_hh", (3 * D,)))]
            if s["mogrify"]:
                k = D // 4
                rows += [same(f"{p}mogrify.{x}.{i}.weight", (D, k) if i else (k, D),
                              f"{q}gate.mogrify.{x.lower()}{i}") for x in "QR" for i in (0, 1)]
        p, q = f"attn_layers.{l}.fn.fn.", f"layers.{l}."
        rows += [same(p + "to_q.weight", (D, D), q + "attn.query.weight"),
                 same(p + "to_kv.weight", (2 * kv, D), q + "attn.kv.weight"),
                 same(p + "to_out.weight", (D, D), q + "attn.out.weight"),
                 same(p + "to_out.bias", (D,), q + "attn.out.bias")]
        conv = p + "compress_mem_fn.conv."
        if l in s["compressing"]:
            rows += [Row([(conv + "weight", (D, D, r))], [q + "compress.weight"],
                         lambda a: [a[0].transpose(0, 2, 1).reshape(D, r * D)],
                         lambda a: [a[0].reshape(D, r, D).transpose(0, 2, 1)]),
                     same(conv + "bias", (D,), q + "compress.bias")]
        # all of their layers have one; unused ones are kept for the conversion back
        else:
            rows += [same(conv + w, shape, "unused." + conv + w)
                     for w, shape in (("weight", (D, D, r)), ("bias", (D,)))]
        p, q = f"ff_layers.{l}.fn.fn.", f"layers.{l}.ff."
        g = 2 if s["glu"] else 1
        rows += [same(p + a, shape, q + b) for a, shape, b in (
            ("w1.weight", (g * F, D), "fc1.weight"), ("w1.bias", (g * F,), "fc1.bias"),
            ("w2.weight", (D, F), "fc2.weight"), ("w2.bias", (D,), "fc2.bias"))]
    return rows


def layer_list(text, L):
    """The layers of --memory-layers, counted from 0."""
    if text in ("all", "none"):
        return list(range(L)) if text == "all" else []
    try:
        layers = [int(x) - 1 for x in text.split(",")]
    except ValueError:
        layers = []
    if not layers or len(set(layers)) != len(layers) or min(layers) < 0 or max(layers) >= L:
        raise Refuse(f"--memory-layers {text}: expected all, none, "
                     f"or layers from 1 to {L} separated by commas")
    return sorted(layers)


def comp_in(t, o):
    H, reach, hd = shape_of(t, "pos_emb", 3)
    D = H * hd
    if any(".mogrify.Q.0.0." in k for k in t):
        raise Refuse("its mogrifiers have biases (a newer release): the library's have none")
    V, E = shape_of(t, "token_emb.weight", 2)
    conv = "attn_layers.0.fn.fn.compress_mem_fn.conv.weight"
    r = shape_of(t, conv, 3)[2]
    L = count_of(t, "attn_layers.%d.fn.fn.to_q.weight")
    F = shape_of(t, "ff_layers.0.fn.fn.w2.weight", 2)[1]
    heads = o.take("heads")
    if heads is not None and heads != H:
        raise Refuse(f"--heads {heads}: it has {H}")
    S = o.need("block-sz", f"the length of a segment, seq_len; pos_emb has {reach} rows for it, "
               "memory and compressed memory together")
    M = o.take("mem", S)
    C = o.take("cmem", M // r)
    if S + M + C != reach:
        raise Refuse(f"--block-sz {S}, --mem {M} and --cmem {C} are {S + M + C} rows, "
                     f"pos_emb has {reach}: give all three")
    text = o.need("memory-layers", "the layers that have a memory, as 6,7,8, "
                  "or all (the original's default); the file does not say it")
    memory = layer_list(text, L)
    kv = shape_of(t, "attn_layers.0.fn.fn.to_kv.weight", 2)[0] // (2 * hd)
    s = {"D": D, "E": E, "V": V, "H": H, "L": L, "r": r, "F": F, "reach": reach, "kv": kv,
         "compressing": memory if C else [], "flat": "to_logits.weight" in t,
         "gru": any(k.startswith("attn_layers.0.gru.") for k in t),
         "old_gru": "attn_layers.0.gru.weight_ih_l0" in t,
         "mogrify": "attn_layers.0.mogrify.Q.0.weight" in t,
         "glu": shape_of(t, "ff_layers.0.fn.fn.w1.weight", 2)[0] == 2 * F}
    if s["flat"] and E != D:
        raise Refuse("to_logits.weight, as of 0.3.13 and before, "
                     "with an embedding of another width is not known")
    if s["mogrify"] and not s["gru"]:
        raise Refuse("it has mogrifiers and no GRU")
    # without target and freeze: only training depends on them, and freeze would stop it
    literal = not o.take("corrected", False)
    rotate = not o.take("no-enhanced-recurrence", False)
    config = {"nlayers": L, "hid-sz": D, "emb-sz": E, "inner-hid-sz": F, "nheads": H,
              "kv-heads": kv, "block-sz": S, "positions": "learned", "norm-after": False,
              "final-norm": False, "glu": s["glu"], "tied": False, "gate": "gru" if s["gru"]
              else "residual", "gate-relu": False, "mogrify": s["mogrify"], "memory-layers": text,
              "mem": M, "cmem": C, "mems": None, "cmems": None, "recurrence": "rotate" if rotate
              else "none", "compress": "conv", "ratio": r, "overlap": 0, "conv-no-bias": False,
              "dilations": None, "aux": "auto", "literal": "rows,pad,mask" if literal else False}
    blob, words = vocabulary(o, V)
    config.update(words)
    return "seqtx.compressive.1", comp_rows(s), config, blob


def comp_out(c, t, old):
    expected = {"positions": "learned", "norm-after": False, "final-norm": False, "tied": False,
            "gate-relu": False, "compress": "conv", "overlap": 0, "conv-no-bias": False,
            "mems": None, "cmems": None}
    for name, value in expected.items():
        if c[name] != value:
            raise Refuse(f"the original has no --{name} {c[name]}")
    if c["gate"] not in ("residual",
                         "gru") or (c["kv-heads"] or c["nheads"]) not in (c["nheads"], 1):
        raise Refuse(f"the original has no --gate {c['gate']}"
                     if c["gate"] not in ("residual", "gru")
                     else f"the original has no --kv-heads {c['kv-heads']}")
    V, E = shape_of(t, "in_emb.weight", 2)
    if old == "0.3.13" and E != c["hid-sz"]:
        raise Refuse("--to compressive-0.3.13: an embedding of another width is not known there")
    D, H, r = c["hid-sz"], c["nheads"], c["ratio"]
    memory = layer_list(c["memory-layers"], c["nlayers"])
    s = {"D": D, "E": E, "V": V, "H": H, "L": c["nlayers"], "r": r,
         "F": shape_of(t, "layers.0.ff.fc2.weight", 2)[1], "reach": shape_of(t, "key_pe", 2)[0],
         "kv": c["kv-heads"] or H, "compressing": memory if c["cmem"] else [],
         "flat": old == "0.3.13", "gru": c["gate"] == "gru", "old_gru": bool(old),
         "mogrify": c["mogrify"], "glu": c["glu"]}
    for l in range(s["L"]):         # a model that was trained with seqtx
        name = f"unused.attn_layers.{l}.fn.fn.compress_mem_fn.conv."
        if l not in s["compressing"] and name + "weight" not in t:
            t[name + "weight"] = np.zeros((D, D, r), np.float32)
            t[name + "bias"] = np.zeros(D, np.float32)
    return comp_rows(s)


# >>transformer-xl -----------------------------------------------------------------------

def turned_rows(a):
    """Hugging Face's head has the cluster columns in ascending order, ours in descending
    order."""
    return [x[::-1] for x in a]


def many(names, shape, ours):
    """One tensor under several names, all but the first of which can be missing."""
    def forth(a):
        other = [n for n, x in zip(names, a) if x is not None and not np.array_equal(a[0], x)]
        if other:
            raise Refuse(f"{names[0]} and {other[0]} should be one tensor, and differ")
        return a[:1]
    return Row([(n, shape) for n in names], [ours], forth, lambda a: a * len(names), names[1:])


def by_layers(name, shape, ours, to):
    """One table for all layers, whose last row is distance 0, split into one per layer,
    whose first row is."""
    return Row([(name, shape)], ours, lambda a: [x[::-1].reshape(to) for x in a[0]],
               lambda a: [np.stack([x.reshape(shape[1:])[::-1] for x in a])])


def xl_word_rows(s):
    """Tables and biases, split at the clusters if they are one tensor (whole); then the
    input has one projection."""
    d, E, V, sizes, pre = s["d"], s["E"], s["V"], s["sizes"], "transformer." if s["hf"] else ""
    emb, out, rows = pre + "word_emb.emb_layers.%d.weight", "crit.out_layers.%d.weight", []
    if not sizes:
        return ([twice(emb % 0, out % 0, (V, d), "in_emb.weight")] if s["tables"] else [
            same(emb % 0, (V, d), "in_emb.weight"), same(out % 0, (V, d), "out_emb.weight")]) + [
            same("crit.out_layers.0.bias", (V,), "out_emb.bias")]
    k = len(sizes)
    if s["whole"]:
        at = np.cumsum(sizes)[:-1]
        ours = [[f"{side}.tables.{i}" for i in range(k)] for side in ("in_emb", "out_emb")]
        if s["tables"]:
            table = twice(emb % 0, out % 0, (V, E), "")
            merge = table.forth
            table.ours = ours[0]
            table.forth = lambda a: np.split(merge(a)[0], at)
            table.back = lambda a: [np.concatenate(a)] * 2
            rows += [table]
        else:
            rows += [parts(emb % 0, (V, E), ours[0], at), parts(out % 0, (V, E), ours[1], at)]
        rows += [parts("crit.out_layers.0.bias", (V,),
                       [f"out_emb.biases.{i}" for i in range(k)], at)]
        if E != d:
            p, q = f"{pre}word_emb.emb_projs.0", "crit.out_projs.%d"
            rows += [many([p] + [q % i for i in range(k) if s["tied"][i]], (d, E),
                          "in_emb.projs.0")]
            rows += [same(q % i, (d, E), f"out_emb.projs.{i}") for i in range(k)
                     if not s["tied"][i]]
    else:
        for i, (size, w) in enumerate(zip(sizes, s["widths"])):
            if s["tables"]:
                rows += [twice(emb % i, out % i, (size, w), f"in_emb.tables.{i}")]
            else:
                rows += [same(emb % i, (size, w), f"in_emb.tables.{i}"),
                         same(out % i, (size, w), f"out_emb.tables.{i}")]
            rows += [same(f"crit.out_layers.{i}.bias", (size,), f"out_emb.biases.{i}")]
            p, q = f"{pre}word_emb.emb_projs.{i}", f"crit.out_projs.{i}"
            if s["tied"][i]:
                rows += [twice(p, q, (d, w), f"in_emb.projs.{i}")]
            else:
                rows += [same(p, (d, w), f"in_emb.projs.{i}"),
                         same(q, (d, w), f"out_emb.projs.{i}")]
    if k > 1:
        flip = turned_rows if s["hf"] else None
        rows += [Row([("crit.cluster_weight", (k - 1, E))], ["out_emb.cluster.weight"], flip, flip),
                 Row([("crit.cluster_bias", (k - 1,))], ["out_emb.cluster.bias"], flip, flip)]
    return rows


def xl_rows(s):
    d = s["d"]
    n = s["H"] * s["dh"]
    H = s["H"]
    dh = s["dh"]
    f = s["f"]
    nl = s["nl"]
    K = s["learned"]
    hf = s["hf"]
    pre, rows = "transformer." if hf else "", xl_word_rows(s)
    for l in range(nl):
        p, q, g = f"{pre}layers.{l}.dec_attn.", f"layers.{2 * l}.attn.", f"layers.{2 * l + 1}.ff."
        rows += [parts(p + "qkv_net.weight", (3 * n, d), [q + "query.weight", q + "kv.weight"],
                       [n]), same(p + "o_net.weight", (d, n), q + "out.weight")]
        rows += [same(f"{p}layer_norm.{w}", (d,), f"{q}norm.{w}") for w in ("weight", "bias")]
        if not K:
            rows += [same(p + "r_net.weight", (n, d), q + "pos.weight")]
        if s["own"] and not K:
            rows += [same(p + "r_w_bias", (H, dh), q + "u"), same(p + "r_r_bias", (H, dh), q + "v")]
        p = f"{pre}layers.{l}.pos_ff."
        rows += [same(p + a, shape, g + b) for a, shape, b in (
            ("CoreNet.0.weight", (f, d), "fc1.weight"), ("CoreNet.0.bias", (f,), "fc1.bias"),
            ("CoreNet.3.weight", (d, f), "fc2.weight"), ("CoreNet.3.bias", (d,), "fc2.bias"),
            ("layer_norm.weight", (d,), "norm.weight"), ("layer_norm.bias", (d,), "norm.bias"))]
    if K:
        ours = [f"layers.{2 * l}.attn." for l in range(nl)]
        return rows + [by_layers("r_emb", (nl, K, H, dh), [q + "rel.weight" for q in ours], (K, n)),
                       by_layers("r_bias", (nl, K, H), [q + "r_bias" for q in ours], (K, H)),
                       Row([("r_w_bias", (nl, H, dh))], [q + "u" for q in ours],
                           lambda a: list(a[0]), lambda a: [np.stack(a)])]
    if not s["own"]:
        rows += [same(pre + "r_w_bias", (H, dh), "attn.u"),
                 same(pre + "r_r_bias", (H, dh), "attn.v")]
    name = pre + "pos_emb.inv_freq"
    return rows + [Row([(name, (d // 2,))], [], lambda a: [], lambda a: [inverse_frequencies(d)],
                       [name])]


def inverse_frequencies(d):
    torch = import_torch()
    return (1 / (10000 ** (torch.arange(0.0, d, 2.0) / d))).numpy()


def xl_ends(o, clusters, V):
    """The first word of every cluster, and V: of a single table for all clusters."""
    if clusters == 1:
        return [0, V]
    text = o.need("cutoffs", f"the ends of its {clusters - 1} first clusters, "
                  "as 20000,40000,200000; the file does not say them")
    try:
        cut = [int(x) for x in text.split(",")]
    except ValueError:
        cut = []
    ends = [0] + cut + [V]
    if len(cut) != clusters - 1 or any(a >= b for a, b in zip(ends, ends[1:])):
        raise Refuse(f"--cutoffs {text}: expected {clusters - 1} increasing values below {V}, "
                     "separated by commas")
    return ends


def xl_segment(o, K):
    """(mem, block-sz or None, clamp-len); K: rows of the tables of learned positions, or 0."""
    mem = o.need("mem", "the rows of memory, mem_len; the file does not say it")
    block, clamp = o.take("block-sz"), o.take("clamp-len", 0)
    if not K:
        return mem, block, clamp
    if not 0 <= mem < K or (block is not None and block != K - mem):
        given = f"--mem {mem}" + ("" if block is None else f" and --block-sz {block}")
        raise Refuse(f"{given}: r_emb has {K} rows, the memory and the segment of the training")
    if clamp == 1:
        raise Refuse("--clamp-len 1: all distances would be one, which train_par cannot express")
    # the first of their last clamp_len rows is distance clamp_len - 1
    return mem, K - mem, max(clamp - 1, 0)


def xl_in(t, o, hf):
    pre = "transformer." if hf else ""
    if "r_emb" in t and ("r_bias" not in t or hf):
        raise Refuse("attn_type 3 has absolute positions, "
                     "and train_par relative ones only (attn_type 0 and 1)")
    if pre + "layers.0.dec_attn.q_net.weight" in t:
        raise Refuse("attn_type 2 and 3 have absolute positions, "
                     "and train_par relative ones only (attn_type 0 and 1)")
    own, K = pre + "layers.0.dec_attn.r_w_bias" in t, 0
    if "r_emb" in t:
        own, (_, K, H, dh) = True, shape_of(t, "r_emb", 4)
    else:
        H, dh = shape_of(t, pre + ("layers.0.dec_attn.r_w_bias" if own else "r_w_bias"), 2)
    heads = o.take("heads")
    if heads is not None and heads != H:
        raise Refuse(f"--heads {heads}: it has {H}")
    d = shape_of(t, pre + "layers.0.dec_attn.o_net.weight", 2)[0]
    k = count_of(t, pre + "word_emb.emb_layers.%d.weight")
    shapes = [shape_of(t, f"{pre}word_emb.emb_layers.{i}.weight", 2) for i in range(k)]
    if not k:
        raise Refuse(f"it lacks {pre}word_emb.emb_layers.0.weight")
    s = {"d": d, "H": H, "dh": dh, "f": shape_of(t, pre + "layers.0.pos_ff.CoreNet.0.weight", 2)[0],
         "hf": hf, "own": own, "tied": [],
         "nl": count_of(t, pre + "layers.%d.dec_attn.o_net.weight"), "V": sum(x[0] for x in shapes),
         "E": shapes[0][1], "sizes": None, "whole": False, "learned": K}
    out = [f"crit.out_layers.{i}.weight" for i in range(k)]
    s["tables"] = all(n not in t or np.array_equal(t[n], t[f"{pre}word_emb.emb_layers.{i}.weight"])
                      for i, n in enumerate(out))
    ties, clusters = "none", 1
    if "crit.cluster_weight" in t:
        clusters = 1 + shape_of(t, "crit.cluster_weight", 2)[0]
    if k == 1 and (clusters > 1 or s["E"] != d):
        ends = xl_ends(o, clusters, s["V"])
        s["whole"] = True
        s["sizes"] = [b - a for a, b in zip(ends, ends[1:])]
        s["widths"] = [s["E"]] * clusters
    elif clusters > 1:
        s["sizes"], s["widths"] = [x[0] for x in shapes], [x[1] for x in shapes]
    elif k > 1:
        raise Refuse("tables of several widths without crit.cluster_weight are not known")
    one = s["whole"] and s["E"] != d
    if one or (s["sizes"] and not s["whole"]):
        for i in range(clusters):
            p, q = f"{pre}word_emb.emb_projs.{0 if one else i}", f"crit.out_projs.{i}"
            s["tied"] += [q not in t or (p in t and np.array_equal(t[p], t[q]))]
        if all(s["tied"]):
            ties = "all"
        elif all(s["tied"][1:]) and clusters > 1:
            ties = "but-first"
        else:
            s["tied"] = [False] * clusters
    mem, block, clamp = xl_segment(o, K)
    norm = o.take("norm", "after") == "before"
    config = {"nlayers": 2 * s["nl"], "pattern": "xl", "hid-sz": d, "nheads": H, "head-sz": dh,
              "inner-hid-sz": s["f"], "block-sz": block or mem or 128, "mem": mem,
              "positions": "learned-bias" if K else "sines", "clamp-len": clamp,
              "same-length": o.take("same-length", False), "norm-before": norm,
              "no-final-norm": norm, "norm-eps": 1e-5, "own-uv": own, "biases": False,
              "words-out": "adaptive" if s["sizes"] else "plain", "adaptive-in": bool(s["sizes"]),
              "tied": s["tables"], "tie-projs": ties, "one-proj": one,
              "cutoffs": ",".join(str(x) for x in np.cumsum(s["sizes"])[:-1])
              if s["sizes"] and clusters > 1 else None, "div-val": ratio_of(s["widths"])
              if s["sizes"] and not s["whole"] else 1, "proj-factor": 0, "proj-dims": None,
              "emb-sz": s["widths"][0] if s["sizes"] else 0, "emb-scale": 0, "pad-id": -1,
              "divide-all": False, "arch": "logits", "sines": "block", "pos-mode": "dist",
              "full-scale": False, "attn-relu": False, "reading": "streams"}
    # their enwik8 and text8 have no <eos>
    blob, words = vocabulary(o, s["V"], "count", eos=bool(s["sizes"]), eos_first=True)
    config.update(words)
    return "seqtx.par.1", xl_rows(s), config, blob


def xl_out(c, t, hf):
    expected = {"pattern": "xl", "biases": False, "sines": "block", "pos-mode": "dist",
            "full-scale": False, "attn-relu": False}
    for name, value in expected.items():
        if c[name] != value:
            raise Refuse(f"Transformer-XL's files have no place for --{name} {c[name]}")
    if c["positions"] not in ("sines", "learned-bias"):
        raise Refuse(f"Transformer-XL's files have no place for --positions {c['positions']}")
    if c["norm-before"] and not c.get("no-final-norm", False):
        raise Refuse("Transformer-XL's files have no place for the norm at the end: "
                     "--norm-before without --no-final-norm")
    learned = c["positions"] == "learned-bias"
    if learned and (hf or not c["own-uv"]):
        raise Refuse("--positions learned-bias is for --to transformer-xl, with --own-uv")
    if not learned and c["own-uv"] != hf:
        raise Refuse("--to transfo-xl is for models with --own-uv, "
                     "--to transformer-xl for those without")
    d, H = c["hid-sz"], c["nheads"]
    s = {"d": d, "H": H, "dh": c["head-sz"] or d // H, "f": c["inner-hid-sz"] or 4 * d, "hf": hf,
         "own": hf, "tied": [], "tables": c["tied"], "nl": c["nlayers"] // 2, "sizes": None,
         "whole": False, "E": d, "learned": c["mem"] + c["block-sz"] if learned else 0}
    if c["words-out"] == "adaptive":
        if not c["adaptive-in"]:
            raise Refuse("Transformer-XL's files have no place for --words-out adaptive without "
                         "--adaptive-in")
        k = count_of(t, "in_emb.tables.%d")
        shapes = [shape_of(t, f"in_emb.tables.{i}", 2) for i in range(k)]
        s["sizes"] = [x[0] for x in shapes]
        s["widths"] = [x[1] for x in shapes]
        s["V"] = sum(x[0] for x in shapes)
        s["whole"] = k == 1 or c.get("one-proj", False) or "in_emb.projs.0" not in t
        s["E"] = s["widths"][0]
        if not s["whole"] and len(set(s["widths"])) == 1:
            raise Refuse("Transformer-XL's files have one projection for clusters of equal width: "
                         "this model is without --one-proj")
        s["tied"] = [c["tie-projs"] == "all" or (c["tie-projs"] == "but-first" and i > 0)
                     for i in range(k)]
    else:
        s["V"] = shape_of(t, "in_emb.weight", 2)[0]
    return xl_rows(s)


# >>par ----------------------------------------------------------------------------------

# the names of u and v, which other versions call u and v
PAR_UV = "global_content_bias", "global_position_bias"


def par_rows(s):
    """Their kernels are (in,out)."""
    D, H, F, V, L = s["D"], s["H"], s["F"], s["V"], s["L"]
    rows = [same("model/embed/embeddings", (V, D), "in_emb.weight")]

    def cut(a):         # the columns of W_emb are Q | V | K; here keys come before values
        q, v, k = np.split(a[0].T, 3)
        return [q, np.concatenate([k, v])]

    def joined(a):
        k, v = np.split(a[1], 2)
        return [np.concatenate([a[0], v, k]).T]
    for l in range(L):
        b, a, f = f"model/stoch_blks/{l}/", f"layers.{l}.attn.", f"layers.{l}.ff."
        rows += [Row([(f"{b}rmha/W_emb/{name}", shape)], [f"{a}query.{to}", f"{a}kv.{to}"],
                     cut, joined)
                 for name, shape, to in (("kernel", (D, 3 * D), "weight"),
                                         ("bias", (3 * D,), "bias"))]
        for name, shape, to in (("rmha/W_pos", (D, D), a + "pos"),
                                ("rmha/dense", (D, D), a + "out"),
                                ("ffn/layer_with_weights-0", (D, F), f + "fc1"),
                                ("ffn/layer_with_weights-1", (F, D), f + "fc2")):
            rows += [turned(f"{b}{name}/kernel", shape, to + ".weight"),
                     same(f"{b}{name}/bias", (shape[1],), to + ".bias")]
        for name, to in zip(s["uv"], "uv"):
            rows += [reshaped(f"{b}rmha/{name}", (1, H, 1, D // H), a + to, (H, D // H))]
        for name, to in (("layernorm_mha", a), ("layernorm_ffn", f)):
            rows += [same(f"{b}{name}/gamma", (D,), to + "norm.weight"),
                     same(f"{b}{name}/beta", (D,), to + "norm.bias")]
        rows += [same(b + "pi", (3,), f"arch.{l}")]
        if s["tau"]:        # unused by the original
            rows += [reshaped(b + "tau", (), f"unused.stoch_blks.{l}.tau", (1,))]
    w = "model/final_layer/"
    if not s["tails"]:
        return rows + [turned(w + "kernel", (D, V), "out_emb.weight"),
                       same(w + "bias", (V,), "out_emb.bias")]
    J, c0 = len(s["tails"]), V - sum(n for _, n in s["tails"])
    rows += [Row([(f"{w}head_w/{name}", shape)], [f"out_emb.{first}.0", f"out_emb.cluster.{to}"],
                 lambda a: np.split(a[0].T, [c0]), lambda a: [np.concatenate(a).T])
             for name, shape, first, to in (("kernel", (D, c0 + J), "tables", "weight"),
                                            ("bias", (c0 + J,), "biases", "bias"))]
    for i, (h, n) in enumerate(s["tails"]):
        t = f"{w}tail_w/{i}/layer_with_weights-"
        rows += [same(t + "0/kernel", (D, h), f"out_emb.projs.{i + 1}"),
                 same(t + "0/bias", (h,), f"out_emb.proj_biases.{i + 1}"),
                 turned(t + "1/kernel", (h, n), f"out_emb.tables.{i + 1}"),
                 same(t + "1/bias", (n,), f"out_emb.biases.{i + 1}")]
    return rows


def par_in(t, o):
    V, D = shape_of(t, "model/embed/embeddings", 2)
    b = "model/stoch_blks/0/"
    uv = PAR_UV if f"{b}rmha/{PAR_UV[0]}" in t else ("u", "v")
    H = shape_of(t, f"{b}rmha/{uv[0]}", 4)[1]
    k = count_of(t, "model/final_layer/tail_w/%d/layer_with_weights-1/kernel")
    tails = [shape_of(t, f"model/final_layer/tail_w/{i}/layer_with_weights-1/kernel", 2)
             for i in range(k)]
    if not H or D % H:
        raise Refuse(f"{H} heads do not divide {D}")
    s = {"D": D, "H": H, "F": shape_of(t, b + "ffn/layer_with_weights-0/kernel", 2)[1], "V": V,
         "uv": uv, "tails": tails, "L": count_of(t, "model/stoch_blks/%d/pi"),
         "tau": b + "tau" in t}
    ends = [V - sum(n for _, n in tails[i:]) for i in range(k)]
    config = {"nlayers": s["L"], "pattern": "search", "hid-sz": D, "nheads": H, "head-sz": 0,
              "inner-hid-sz": s["F"],
              "block-sz": o.need("block-sz", "the tokens of a segment, "
                                 "on which the positions depend; the file does not say it"),
              "mem": o.need("mem", "the rows of memory; the file does not say it"),
              "positions": "sines", "clamp-len": 0, "same-length": False, "norm-before": False,
              "norm-eps": 0.001, "own-uv": True, "biases": True, "words-out": "reference"
              if k else "plain", "adaptive-in": False, "tied": False, "tie-projs": "none",
              "cutoffs": ",".join(map(str, ends)) if k else None, "div-val": 0, "proj-factor": 4,
              "proj-dims": ",".join(str(h) for h, _ in tails) if k else None, "emb-sz": 0,
              "emb-scale": 0, "pad-id": 0 if k else -1, "divide-all": True, "arch": "pi",
              "gate-eval": "noise", "sines": "reference", "pos-mode": "reference",
              "full-scale": True, "attn-relu": True, "reading": "streams"}
    blob, words = vocabulary(o, V, "count")
    config.update(words)
    return "seqtx.par.1", par_rows(s), config, blob


def par_out(c, t, uv):
    expected = {"pattern": "search", "positions": "sines", "clamp-len": 0, "same-length": False,
            "norm-before": False, "norm-eps": 0.001, "own-uv": True, "biases": True,
            "adaptive-in": False, "tied": False, "arch": "pi", "sines": "reference",
            "pos-mode": "reference", "full-scale": True, "attn-relu": True}
    for name, value in expected.items():
        if c[name] != value:
            raise Refuse(f"PAR's files have no place for --{name} {c[name]}, only for --{name} "
                         f"{value}" if not isinstance(value, bool) else f"PAR's files have no "
                         f"place for a model {'without' if value else 'with'} --{name}")
    V, D = shape_of(t, "in_emb.weight", 2)
    H, k = c["nheads"], count_of(t, "out_emb.tables.%d")
    if c["words-out"] != ("reference" if k else "plain"):
        raise Refuse(f"PAR's files have no place for --words-out {c['words-out']}, "
                     "only for plain and reference")
    if c["head-sz"] not in (0, D // H) or c["emb-scale"] not in (0, math.sqrt(D)):
        raise Refuse(f"PAR's files have no place for --head-sz {c['head-sz']} and --emb-scale "
                     f"{c['emb-scale']}: heads divide --hid-sz, "
                     "and the embedding is multiplied by its root")
    tails = [shape_of(t, f"out_emb.tables.{i}", 2)[::-1] for i in range(1, k)]
    return par_rows({"D": D, "H": H, "F": shape_of(t, "layers.0.ff.fc1.weight", 2)[0], "V": V,
                     "uv": uv, "tails": tails, "L": c["nlayers"],
                     "tau": "unused.stoch_blks.0.tau" in t})


def write_par(path, out, plain):
    """Writes both names of u and v, so that either version of the model finds them, and a
    save counter."""
    prefix = out[:-6] if out.endswith(".index") else out
    if any(os.path.exists(f) and os.path.samefile(path, f) for f in tensorflow_files(prefix)):
        raise Refuse(f"{path}: IN and OUT are one file")
    number = re.search(r"-(\d{1,18})$", prefix)       # TensorFlow's save counter
    plain["save_counter"] = np.array(int(number[1]) if number else 1, np.int64)
    aliases = dict(zip(PAR_UV + ("u", "v"), ("u", "v") + PAR_UV))
    write_tensorflow(prefix, plain, aliases)


# >>formats ------------------------------------------------------------------------------

# name: (prefix of the names in its files, our format, into ours, out of ours)
FORMATS = OrderedDict([
    ("attn-span", ("module.", "attn_span", lambda t, o: span_in(t, o, False),
                   lambda c, t, stack: span_out(c, t, False))),
    ("fairseq-span", ("decoder.model.", "attn_span", lambda t, o: span_in(t, o, True),
                      lambda c, t, stack: span_out(c, t, True))),
    ("sru-2.6", ("", "sru", lambda t, o: sru_in(t, o, "2.6"),
                 lambda c, t, stack: sru_out(c, t, "2.6", stack))),
    ("sru-3.0", ("", "sru", lambda t, o: sru_in(t, o, "3.0"),
                 lambda c, t, stack: sru_out(c, t, "3.0", stack))),
    ("sru++",
     ("", "sru", lambda t, o: sru_in(t, o, "++"), lambda c, t, stack: sru_out(c, t, "++", stack))),
    ("compressive", ("net.", "compressive", comp_in, lambda c, t, stack: comp_out(c, t, ""))),
    ("compressive-0.3.18",
     ("net.", "compressive", comp_in, lambda c, t, stack: comp_out(c, t, "0.3.18"))),
    ("compressive-0.3.13",
     ("net.", "compressive", comp_in, lambda c, t, stack: comp_out(c, t, "0.3.13"))),
    ("par", ("", "par", par_in, lambda c, t, stack: par_out(c, t, PAR_UV))),
    ("par-uv", ("", "par", par_in, lambda c, t, stack: par_out(c, t, ("u", "v")))),
    ("transformer-xl",
     ("", "par", lambda t, o: xl_in(t, o, False), lambda c, t, stack: xl_out(c, t, False))),
    ("transfo-xl",
     ("", "par", lambda t, o: xl_in(t, o, True), lambda c, t, stack: xl_out(c, t, True))),
])


def recognise(tensors, path):
    """(format, prefix of all names) of an original."""
    marks = (("attn-span", "layers.0.attn.proj_query.weight"), ("sru", "rnn_lst.0.bias"),
             ("sru", "rnn.rnn_lst.0.bias"), ("compressive", "attn_layers.0.fn.fn.to_q.weight"),
             ("par", "model/embed/embeddings"),
             ("transformer-xl", "layers.0.dec_attn.o_net.weight"),
             ("transfo-xl", "transformer.layers.0.dec_attn.o_net.weight"))
    prefixes = ("", "module.", "decoder.model.", "net.", "net.net.", "module.net.")
    for name in tensors:
        for kind, mark in marks:
            pre = name[:len(name) - len(mark)]
            if not name.endswith(mark) or pre not in prefixes:
                continue
            if kind == "attn-span" and pre == "decoder.model.":
                return "fairseq-span", pre
            if kind == "sru":
                inside = [n for n in tensors if ".transform_module." in n]
                if any(n.endswith(".linear1.weight") for n in inside):
                    return "sru++", pre
                return "sru-3.0" if inside else "sru-2.6", pre
            if kind == "compressive" and pre + "to_logits.weight" in tensors:
                return "compressive-0.3.13", pre
            if kind == "compressive" and pre + "attn_layers.0.gru.weight_ih_l0" in tensors:
                return "compressive-0.3.18", pre
            if kind == "par" and "model/stoch_blks/0/rmha/u" in tensors:
                kind = "par-uv"
            hugging = any(n.startswith(pre + "transformer.") for n in tensors)
            if kind.startswith("transfo") and hugging:
                kind = "transfo-xl"
            return kind, pre
    raise Refuse(f"{path}: no kind of model that is known here has names like "
                 f"{words_of(tensors) or 'none'}; kinds are {', '.join(FORMATS)}")


def into_ours(path, out, value, o, told, to):
    kind, pre = recognise(value, path)
    if told and told != kind:
        raise Refuse(f"--from {told}: its names are those of {kind}")
    if to not in (None, "seqtx"):
        raise Refuse(f"--to {to}: {path} is {kind}, "
                     "which becomes a checkpoint of ours (--to seqtx)")
    other = [n for n in value if not n.startswith(pre)]
    if other:
        raise Refuse(f"names that are not known: {words_of(other)}")
    plain = OrderedDict((n[len(pre):], a) for n, a in value.items())
    form, rows, config, blob = FORMATS[kind][2](plain, o)
    o.finish(kind)
    tensors = to_ours(rows, plain)
    if blob is not None:
        tensors["vocab"] = np.ascontiguousarray(blob)
    config = json.dumps(dict({"preset": None, "seed": 1, "batch-sz": 1, "batch-split": 1,
                              "precision": "f32", "tf32": False}, **config))
    write_safetensors(out, tensors,
                      OrderedDict([("format", form), ("config", config), ("step", "0"),
                                   ("converted.from", kind), ("converted.prefix", pre)]))
    if blob is None:
        return (f"{kind} -> {out}: the parameters of a stack without words, "
                "for stx_sru_create and stx_params_load")
    return (f"{kind} -> {out}: "
            f"build/train_{FORMATS[kind][1]} --checkpoint {out} --eval-only --data FILE")


def usual_format(family, config):
    """The format of an original whose options a checkpoint has; None if several are possible."""
    if family == "attn_span":
        return "fairseq-span" if config.get("no-renorm") else "attn-span"
    if family == "compressive":
        return "compressive"
    if family == "sru":
        return "sru++" if config.get("cell") == "sru++" else None
    if config.get("sines") == "reference":
        return "par"
    own = config.get("own-uv") and config.get("positions") != "learned-bias"
    return "transfo-xl" if own else "transformer-xl"


def out_of_ours(path, out, tensors, meta, o, told, to):
    form = meta["format"]
    family = [f for f in ("attn_span", "sru", "compressive", "par")
              if form.startswith(f"seqtx.{f}.")]
    if not family or meta.get("config") is None:
        raise Refuse(f"{path}: format {form} is not known")
    if told not in (None, "seqtx"):
        raise Refuse(f"--from {told}: {path} is a checkpoint of ours")
    if str(checksum(tensors, {k: v for k, v in meta.items() if k != "seal"})) != meta.get("seal"):
        raise Refuse(f"{path} is damaged: its contents do not match its checksum; use another copy")
    choices = [k for k, f in FORMATS.items() if f[1] == family[0]]
    config = config_of(path, meta)
    if to is None:
        to = meta.get("converted.from", usual_format(family[0], config))
        if to is None:
            raise Refuse("--to is needed: sru-2.6 or sru-3.0, "
                         "whose layouts of weights differ")
    if to not in choices:
        raise Refuse(f"--to {to}: {path} can become {', '.join(choices)}")
    o.finish("a checkpoint of ours: it knows its sizes")
    try:
        rows = FORMATS[to][3](config, tensors, form.startswith("seqtx.sru.stack"))
    except KeyError as e:
        raise Refuse(f"{path}: its configuration lacks {e}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise Refuse(f"{path}: its configuration is not one that a trainer writes ({e})") from None
    plain = to_theirs(rows, tensors)
    if to in ("par", "par-uv"):
        write_par(path, out, plain)
        return f"{form} -> {out}: {to}"
    torch = import_torch()
    pre = FORMATS[to][0]
    if meta.get("converted.from") == to:
        pre = meta.get("converted.prefix", pre)
    state = OrderedDict((pre + n, torch.from_numpy(np.array(a))) for n, a in plain.items())
    if to == "attn-span":
        state = {"iter_no": 0, "model": state}
    elif to == "fairseq-span":
        state = {"model": state}
    write_pickle(out, state)
    return f"{form} -> {out}: {to}"


# >>command line -------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refuse(message)


def command_line(words):
    p = Parser(prog="convert.py",
               description="Other programs' checkpoints into those of the trainers here, and back: "
               "see docs/convert.md.", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    p.add_argument("IN")
    p.add_argument("OUT")
    formats = ["seqtx"] + list(FORMATS)
    p.add_argument("--from", metavar="FORMAT", choices=formats, help="only a check: "
                   "what the names in IN have to be")
    p.add_argument("--to", metavar="FORMAT", choices=formats,
                   help="from a checkpoint of ours: " + ", ".join(FORMATS))
    g = p.add_argument_group("what a file does not say of its model")
    g.add_argument("--heads", type=int, help="attention heads")
    g.add_argument("--block-sz", type=int, help="tokens of a block; compressive: "
                   "the length of a segment")
    g.add_argument("--mem", type=int, help="compressive, Transformer-XL: rows of memory")
    g.add_argument("--cmem", type=int, help="compressive: rows of compressed memory")
    g.add_argument("--memory-layers", metavar="LIST", help="compressive: layers with memory, "
                   "as 6,7,8, or all")
    g.add_argument("--no-enhanced-recurrence", action="store_true", help="compressive: "
                   "memory stays in its layer")
    g.add_argument("--ramp", type=float, help="adaptive span: "
                   "length of the soft end of a span (32)")
    g.add_argument("--norm", choices=["before", "after"], help="SRU: where the layer norm of a "
                   "cell is; Transformer-XL: before, if it has pre_lnorm (after)")
    g.add_argument("--no-skip", action="store_true", help="SRU: no highway")
    g.add_argument("--tanh", action="store_true", help="SRU: tanh of the state")
    g.add_argument("--cutoffs", metavar="LIST", help="Transformer-XL of one table: "
                   "ends of the clusters")
    g.add_argument("--clamp-len", type=int, help="Transformer-XL: distances beyond it count as it")
    g.add_argument("--same-length", action="store_true", help="Transformer-XL: "
                   "a query sees --mem keys and no more")
    g.add_argument("--corrected", action="store_true", help="the form that the trainers here have "
                   "by default, where the original differs")
    g = p.add_argument_group("its vocabulary, unless its 256 tokens are bytes")
    g.add_argument("--tokens", choices=list(KINDS), help="what a token is, as in the trainers")
    g.add_argument("--text", metavar="FILE", help="the training text: "
                   "its tokens are counted as the original did")
    g.add_argument("--order", choices=ORDERS, help="... and numbered so, "
                   "in place of the original's usual order")
    g.add_argument("--vocab", metavar="FILE", help="in place of --text: a piece a line, "
                   "or a checkpoint of ours")
    return p.parse_args(words)


def run(words):
    given = {k.replace("_", "-"): v for k, v in vars(command_line(words)).items()}
    path, out = given.pop("IN"), given.pop("OUT")
    told, to = given.pop("from", None), given.pop("to", None)
    if np is None:
        raise Refuse("numpy is missing: pip install numpy, or run this with a Python that has it")
    o = Options(given)
    prefix = path[:-6] if path.endswith(".index") else path
    try:
        if os.path.exists(prefix + ".index"):
            return into_ours(prefix, out, read_tensorflow(prefix), o, told, to)
        with open(path, "rb") as f:
            begin = f.read(9)
        if os.path.exists(out) and os.path.samefile(path, out):
            raise Refuse(f"{path}: IN and OUT are one file")
        if os.path.isdir(out):
            raise Refuse(f"{out} is a directory")
    except OSError as e:
        raise Refuse(f"{path}: {e.strerror}") from None
    if begin[8:9] == b"{":
        tensors, meta = read_safetensors(path)
        if str(meta.get("format", "")).startswith("seqtx."):
            return out_of_ours(path, out, tensors, meta, o, told, to)
        value = OrderedDict((n, a.astype(np.float32) if a.dtype == np.float16 else a)
                            for n, a in tensors.items())
    else:
        value = state_dict_of(path, read_pickle(path))
    return into_ours(path, out, value, o, told, to)


def main():
    try:
        print(run(sys.argv[1:]))
    except Refuse as e:
        print(f"convert.py: {e}", file=sys.stderr)
        return 2
    except MemoryError:
        print("convert.py: there is not enough memory for this file", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
