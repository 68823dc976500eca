#!/usr/bin/env python3
"""test_seqtx.py - tests the Python module seqtx against the C programs

    test_seqtx.py BUILD         BUILD: directory of the trainers

Scores, generated texts and losses of training loops must be those of C to the last digit
that C prints. Structs, constants and offsets must be those of the C compiler. Called by
python.sh, which installs the module.
"""
import gc
import os
import subprocess
import sys
import tempfile
import threading
import weakref

import numpy as np

import seqtx
from seqtx import lib

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.abspath(sys.argv[1])
WORK = tempfile.TemporaryDirectory(prefix="seqtx-python.")
TEXT = "".join(open(os.path.join(TOP, "README.md"), encoding="utf-8").readlines()[:120])
PASSED, FAILED = [], []


def check(what, ok):
    (PASSED if ok else FAILED).append(what)
    if not ok:
        print(f"FAILED {what}")


def fails(what, kind, text, call, *args, **kwargs):
    """call must raise an exception of this kind whose text contains `text`."""
    try:
        call(*args, **kwargs)
        got = "no exception"
    except Exception as e:
        got = f"{type(e).__name__}: {e}"
        if isinstance(e, kind) and text in str(e):
            PASSED.append(what)
            return
    FAILED.append(what)
    print(f"FAILED {what}: {got}")


def work(name):
    return os.path.join(WORK.name, name)


def run(program, *args):
    command = [program if os.path.isabs(program) else os.path.join(BUILD, program), *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL).stdout.decode("utf-8", "replace")


def compiled(source, program):
    cc = os.environ.get("CC", "cc").split()
    library = os.path.dirname(lib._dll._name)
    subprocess.check_call(cc + ["-std=c99", "-Wall", "-Werror", f"-I{TOP}", source, "-o", program,
                                lib._dll._name, f"-Wl,-rpath,{library}", "-lm", "-pthread"])
    return program


def headers():
    names = sorted(f for f in os.listdir(TOP) if f.startswith("seqtx") and f.endswith(".h"))
    return "".join(f'#include "{n}"\n' for n in names)


# ---- declarations ----

def declarations():
    expected, lines = [], []
    for name in lib._api["structs"]:
        struct = getattr(lib, name)
        expected.append(f"{name} {np.ctypeslib.ctypes.sizeof(struct)}")
        lines.append(f'    printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            at = getattr(struct, field)
            expected.append(f"{name}.{field} {at.offset} {at.size}")
            lines.append(f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                         f"sizeof((({name} *)0)->{field}));")
    for name, value in lib._api["constants"].items():
        if name != "STX_NCCL_ID":           # only in builds with NCCL
            expected.append(f"{name} {value}")
            lines.append(f'    printf("{name} %llu\\n", (unsigned long long){name});')
    with open(work("declarations.c"), "w") as f:
        f.write(f"{headers()}#include <stddef.h>\n#include <stdio.h>\n"
                "int main(void) {\n" + "\n".join(lines) + "\n    return 0;\n}\n")
    got = run(compiled(work("declarations.c"), work("declarations"))).splitlines()
    got = [str(int(g.split()[1]) % 2**64) if g.startswith("STX_") else g for g in got]
    mine = [str(int(e.split()[1]) % 2**64) if e.startswith("STX_") else e for e in expected]
    for g, m, e in zip(got, mine, expected):
        if g != m:
            print(f"C: {g}, Python: {e}")
    check("structs, fields and constants are those of C", got == mine)
    check("... all of them", len(lib._api["structs"]) > 75 and len(lines) > 1000)
    missing = [n for n in lib._api["functions"] if not hasattr(lib._dll, n)]
    check("the library has all functions that the headers declare" + str(missing), not missing)


# ---- checkpoints ----

SMALL = ["--steps", "2", "--batch-sz", "2", "--streams", "0", "--eval-every", "9", "--threads", "1"]
SPAN = ["--nlayers", "2", "--hid-sz", "32", "--nheads", "2"]
COMP = SPAN + ["--block-sz", "16", "--mem", "16", "--cmem", "8"]
VARIANTS = [
    ("attn_span", []),
    ("attn_span", SPAN + ["--no-adapt-span", "--attn-span", "40", "--pers-mem-size", "8",
                          "--tokens", "chars", "--precision", "f32", "--literal", "memory"]),
    ("attn_span", SPAN + ["--tokens", "words", "--adapt-io", "--adapt-io-cutoffs", "30,60",
                          "--adapt-io-tied", "--min-count", "2", "--precision", "f32"]),
    ("attn_span", SPAN + ["--literal", "all,no-memory"]),
    ("sru", []),
    ("sru", ["--nlayers", "3", "--cell", "sru", "--hid-sz", "32", "--emb-sz", "24", "--proj-sz",
             "16", "--norm", "after", "--rescale", "--precision", "f32"]),
    ("sru", ["--nlayers", "3", "--hid-sz", "32", "--nheads", "2", "--attention",
             "--attention-last", "1", "--norm", "before", "--eval-unroll", "16"]),
    ("sru", ["--nlayers", "2", "--hid-sz", "32", "--attention", "--attention-last", "0",
             "--attention-every", "2", "--tokens", "words", "--adapt-io", "--emb-sz", "32",
             "--adapt-io-cutoffs", "50", "--min-count", "2"]),
    ("compressive", []),
    ("compressive", COMP + ["--compress", "max", "--positions", "learned", "--gate", "gru",
                            "--mogrify", "--kv-heads", "1", "--no-norm-after"]),
    ("compressive", COMP + ["--memory-layers", "2", "--recurrence", "ernie", "--literal",
                            "all,no-rows", "--positions", "learned", "--emb-sz", "16"]),
    ("compressive", COMP + ["--mems", "16,8", "--cmems", "4,8", "--compress", "dilated",
                            "--dilations", "1,2", "--attn-dropout", "-1", "--dropout", "0.1"]),
    ("par", []),
    ("par", ["--pattern", "search", "--nlayers", "3", "--hid-sz", "32", "--nheads", "2",
             "--gate-eval", "soft", "--arch", "pi", "--latency", "add", "--latency-table", "2,1"]),
    ("par", ["--pattern", "(sf)2f", "--hid-sz", "32", "--nheads", "2", "--words-out", "adaptive",
             "--adaptive-in", "--tied", "--cutoffs", "50,120", "--div-val", "2", "--tie-projs",
             "all", "--positions", "learned", "--norm-before", "--precision", "f32"]),
    ("par", ["--pattern", "par:2", "--nlayers", "6", "--hid-sz", "32", "--nheads", "2",
             "--words-out", "reference", "--cutoffs", "64", "--proj-dims", "8", "--sines",
             "reference", "--pos-mode", "reference", "--pad-id", "32", "--eval-block-sz", "24"]),
]


def trained(family, options, name):
    path = work(name)
    if not os.path.exists(path):
        run(f"train_{family}", "--data", work("text"), "--checkpoint", path, "--seed", "3",
            *SMALL, *options)
    return path


def checkpoints():
    with open(work("text"), "w", encoding="utf-8") as f:
        f.write(TEXT)
    with open(work("score"), "w", encoding="utf-8") as f:
        f.write(TEXT[-700:])
    for k, (family, options) in enumerate(VARIANTS):
        name = f"{family} {' '.join(options)}"
        path = trained(family, options, f"{k}.safetensors")
        with seqtx.open(path, threads=1) as m:
            compare(name, family, path, m)
    old = os.path.join(HERE, "..", "trainers", "old")
    for f in sorted(os.listdir(old)):
        family = f.split(".")[0].split("_literal")[0].split("_bare")[0].split("_padding")[0]
        path = os.path.join(old, f)
        fails(f"an old checkpoint: {f}", seqtx.FormatError, "--export", seqtx.open, path)
        program = [f"train_{family}", "--threads", "1", "--checkpoint"]
        run(*program, path, "--no-train", "--export", work("exported"))
        with seqtx.open(work("exported"), threads=1) as m:
            text = m.decode(np.arange(len(m.vocab)).repeat(3)) + "\n"
            with open(work("old"), "w", encoding="utf-8") as out:
                out.write(text)
            row = run(*program, path, "--score", work("old")).splitlines()[1].split("\t")
            check("... exported", f"{m.score(text).nats:.6f}" == row[2])


def compare(name, family, path, m):
    text = TEXT[-700:]
    program = [f"train_{family}", "--checkpoint", path, "--threads", "1"]
    row = run(*program, "--score", work("score")).splitlines()[1]
    s = m.score(text)
    check(f"{name}: score of ids", m.score(m.encode(text))[::2] == s[::2]
          and m.score(m.encode(text)).bytes == len(m.vocab.decode_bytes(m.encode(text))))
    tokens = s.tokens - int((m.encode(text) == m.desc["pad_id"]).sum()
                            if m.desc.get("pads") else 0)
    mine = f"{s.nats:.6f}"
    check(f"{name}: score", mine == row.split("\t")[2] and str(tokens) == row.split("\t")[0])
    if not m.desc.get("pads"):
        check(f"{name}: its units",
              f"{s.bits_per_byte:.6f}\t{s.perplexity:.6f}" == row.split("\t", 3)[3])
    if m.desc.get("literal") and family == "sru":
        return                      # it cannot generate
    rows = run(*program, "--score", work("score"), "--score-by", "tokens").splitlines()[1:]
    mine = [f"{-p:.6f}" for p in m.log_probs(text)]
    if not m.desc.get("pads"):
        check(f"{name}: log p of each token", [r.split("\t")[1] for r in rows] == mine)
        blocks = m.log_probs(text, block=m._block)
        check(f"{name}: log p by blocks", abs(-blocks.sum() - s.nats) < 1e-5 * s.nats)
    prompt = "The library " if m.vocab.kind != "words" else "The"
    said = run(*program, "--no-train", "--generate", "40", "--seed", "5", "--prompt", prompt)
    mine = prompt + " " * (m.vocab.kind == "words") + m.generate(prompt, 40, seed=5)
    check(f"{name}: generated text", mine.rstrip("\n") == said.rstrip("\n"))
    said = run(*program, "--no-train", "--generate", "40", "--seed", "6", "--top-k", "9",
               "--top-p", "0", "--temperature", "1.1", "--repetition-penalty", "1.3",
               "--repetition-window", "0")
    mine = m.generate(tokens=40, seed=6, top_k=9, top_p=0, temperature=1.1, repetition_penalty=1.3,
                      repetition_window=0)
    check(f"{name}: sampling options", mine.rstrip("\n") == said.rstrip("\n"))


# ---- training ----

def models():
    span = seqtx.AttnSpan(31, layers=2, dim=32, heads=2, span=32, adapt_span=1, span_loss=0.001,
                          dropout=0.1, threads=1, seed=11)
    sru = seqtx.Sru(31, dim=32, layers=2, heads=2, transform="attention", norm="after", dropout=0.1,
                    threads=1, seed=11)
    comp = seqtx.Compressive(31, layers=2, dim=32, heads=2, segment=16, mems=[16, 8], gate="gru",
                             threads=1, seed=11)
    par = seqtx.Par(31, pattern="(sf)2", dim=32, heads=2, segment=16, cutoff=[10], emb_scale=0.5,
                    threads=1, seed=11)
    return {"attn_span": (span, "adam"), "sru": (sru, "radam"), "compressive": (comp, "adamw"),
            "par": (par, "muon")}


def batch(step):
    t = step * 16 + np.arange(16) + 5 * np.arange(3)[:, None]
    return t * t % 31, (t + 1) * (t + 1) % 31


def c_hex(value):
    """A double as printf's %a writes it: float.hex() without zeros at the end."""
    digits, exponent = float(value).hex().split("p")
    return digits.rstrip("0").rstrip(".") + "p" + exponent


def training():
    expected = run(compiled(os.path.join(HERE, "losses.c"), work("losses"))).splitlines()
    lines = []
    for name, (m, kind) in models().items():
        optim = seqtx.Optim(m, kind, clip=1)
        memory = m.memory(3)
        for step in range(12):
            loss = m.loss(*batch(step), memory)
            lines.append(f"{name} {c_hex(loss.nll)} {c_hex(loss.total)}")
            loss.backward()
            check(f"{name}: an update", optim.step(0.004 / (step + 1)))
        check(f"{name}: counts of the optimiser", optim.steps == 12 and optim.grad_norm > 0)
        ids = m.generate_ids([7], 20, temperature=0)
        lines += [f"{name} id {i}" for i in ids] + [name]
        check(f"{name}: log p sums to 1",
              np.allclose(np.exp(m.predict(batch(0)[0]).astype(np.float64)).sum(-1), 1, atol=1e-5))
        lp = m.predict(batch(0)[0])
        nll = -np.take_along_axis(lp, batch(0)[1][..., None], -1).mean()
        check(f"{name}: evaluate is the mean of log p", abs(m.evaluate(*batch(0)) - nll) < 1e-5)
        out = m.generator(batch=3).feed(batch(0)[0])
        check(f"{name}: a generator of three texts", out.shape == (3, 31))
    different = [(e, m) for e, m in zip(expected, lines) if e != m]
    for e, m in different[:3]:
        print(f"C: {e}\nPython: {m}")
    check("losses and texts of a training loop are those of C", expected == lines)


def gradients():
    m = seqtx.AttnSpan(31, layers=1, dim=16, heads=1, span=16, seed=2)
    w = m.params["layers.0.attn.wq"]
    loss = m.loss(*batch(0))
    loss.backward(0.5)
    g = m.grads["layers.0.attn.wq"].copy()
    i = np.unravel_index(np.abs(g).argmax(), g.shape)
    was, values = w[i], []
    for step in (-1e-2, 1e-2):
        w[i] = was + step               # the model sees it: no copy
        values.append(m.evaluate(*batch(0)))
    w[i] = was
    slope = (values[1] - values[0]) / 2e-2
    check("gradients, scaled, through arrays of parameters",
          abs(0.5 * slope - g[i]) < 0.05 * abs(g[i]))
    m.loss(*batch(0)).backward(0.5)
    check("gradients add up", np.allclose(m.grads["layers.0.attn.wq"], 2 * g, rtol=1e-4, atol=1e-7))
    check("names and shapes", m.params["in_emb.weight"].shape == (31, 16)
          and sum(p.size for p in m.params.values()) == m.size)
    old = m.loss(*batch(0))
    m.evaluate(*batch(0))
    fails("backward after another step", RuntimeError, "another step", old.backward)
    new = m.loss(*batch(0))
    new.backward()
    fails("backward twice", seqtx.Error, "stx_backward", new.backward)


# ---- memory of the library ----

def lifetimes():
    m = seqtx.AttnSpan(31, layers=1, dim=16, heads=1, span=16, seed=2)
    context = weakref.ref(m.context)
    w = m.params["layers.0.attn.wq"][1:3]
    saved = w.copy()
    memory = m.memory(3)
    m.evaluate(*batch(0), memory)
    m.close()
    fails("a closed model", ValueError, "closed", m.evaluate, *batch(0))
    fails("a memory of a closed model", ValueError, "closed", memory.reset)
    fails("params of a closed model", ValueError, "closed", lambda: m.params)
    del m, memory
    gc.collect()
    check("an array keeps its context alive", context() is not None and (w == saved).all())
    w += 1
    check("... and can be written", (w == saved + 1).all())
    del w
    gc.collect()
    check("the last array frees it", context() is None)

    for name in models():
        m = models()[name][0]
        memory = m.memory(3)
        m.evaluate(*batch(0), memory)
        rows = memory.arrays()
        first = next(r for part in rows.values() for r in part if r.size)
        check(f"{name}: rows of a memory", first.shape[0] == 3 and first.any()
              and not first.flags.writeable)
        part = first[1]
        del rows, first
        fails(f"{name}: a memory in use", BufferError, "still in use", m.evaluate, *batch(1),
              memory)
        fails(f"{name}: reset of a memory in use", BufferError, "still in use", memory.reset)
        check(f"{name}: another memory", m.evaluate(*batch(1), m.memory(3)) > 0)
        held = part.copy()
        context = weakref.ref(m.context)
        expected = m.evaluate(*batch(1), None)
        memory_2 = m.memory(3)
        m.evaluate(*batch(0), memory_2)
        expected = m.evaluate(*batch(1), memory_2)
        state = weakref.ref(memory)
        del memory
        gc.collect()
        m.evaluate(*batch(1))           # frees what is no longer used
        check(f"{name}: an array keeps the memory", (part == held).all() and state() is not None)
        del part
        gc.collect()
        check(f"{name}: ... no longer", state() is None)
        memory = m.memory(3)
        m.evaluate(*batch(0), memory)
        memory.save(work("memory"))
        other = m.memory(3)
        other.load(work("memory"))
        check(f"{name}: a saved memory", m.evaluate(*batch(1), other) == expected
              == m.evaluate(*batch(1), memory))
        other.reset(0)
        other.reset()
        del m, memory, memory_2, other
        gc.collect()
        check(f"{name}: the context is freed", context() is None)

    used = []
    for _ in range(60):                 # models come and go
        m = seqtx.AttnSpan(31, layers=2, dim=128, heads=2, span=64, threads=1)
        m.evaluate(*batch(0), m.memory(3))
        with m.generator() as g:
            g.feed([1])
        with open("/proc/self/statm") as f:
            used.append(int(f.read().split()[1]))
    check(f"no memory is lost: {used[9]} pages, later {used[-1]}", used[-1] < used[9] + 4000)


def threads_and_processes():
    m = seqtx.AttnSpan(31, layers=2, dim=32, heads=2, span=32, threads=1)
    expected = m.evaluate(*batch(0))
    got = []
    threads = [threading.Thread(target=lambda: got.extend(
        m.evaluate(*batch(0), m.memory(3)) for _ in range(30))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check("four threads, one model", got == [expected] * 120)
    child = os.fork()
    if not child:
        try:
            m.evaluate(*batch(0))
            os._exit(1)
        except seqtx.Error:
            del m
            gc.collect()
            os._exit(7)
    check("a forked process is refused, and ends",
          os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
          if hasattr(os, "waitstatus_to_exitcode") else os.waitpid(child, 0)[1] == 7 << 8)


# ---- errors, vocabularies, files ----

def errors():
    A = seqtx.AttnSpan
    fails("an unknown argument", TypeError, "'lyers'; the arguments are vocab, layers", A, 31,
          lyers=2)
    fails("a value of the library's checks", seqtx.ArgumentError, "stx_span_create: heads", A, 31,
          dim=32, heads=5)
    fails("a fraction", TypeError, "layers: ", A, 31, layers=2.5)
    fails("a negative size", ValueError, "layers: -1 does not fit", A, 31, layers=-1)
    fails("no vocabulary", ValueError, "vocab", A, 0)
    fails("a constant", ValueError, "got 'zip'", seqtx.Compressive, 31, compress="zip")
    fails("too many values", ValueError, "at most 7", A, 31, adapt_io=1, cutoff=list(range(1, 10)))
    fails("too little memory", MemoryError, "max_bytes", A, 31, max_bytes=10000)
    fails("no such file", OSError, "nowhere", seqtx.open, "nowhere")
    readme = os.path.join(TOP, "README.md")
    fails("not a checkpoint", seqtx.FormatError, "README.md", seqtx.open, readme)
    golden = os.path.join(TOP, "tests", "golden", "ops.safetensors")
    fails("another safetensors file", seqtx.FormatError, "a trainer's checkpoint",
          seqtx.open, golden)
    m = A(31, layers=1, dim=16, heads=1, span=16)
    fails("an id out of range", ValueError, "31", m.evaluate, [[31]], [[1]])
    check("... and the model can be used", m.evaluate([1, 2], [2, 3]) > 0)
    fails("shapes", ValueError, "one shape", m.loss, [1, 2], [1])
    fails("text instead of ids", TypeError, "encode", m.loss, list("ab"), list("ab"))
    fails("floats instead of ids", TypeError, "float", m.loss, [1.0], [1.0])
    fails("ids beyond 32 bits", ValueError, "2^31", m.loss, [2**40], [1])
    fails("no vocabulary for a text", ValueError, "no vocabulary", m.generate, "a")
    fails("another model's memory", ValueError, "another model", m.evaluate, [1], [1],
          A(31, layers=1, dim=16, heads=1).memory())
    fails("an optimiser", ValueError, "got 'adm'", seqtx.Optim, m, "adm")
    for name, bad in [("tokens", -1), ("temperature", -1), ("temperature", np.nan), ("top_k", -1),
                      ("top_p", 1.5), ("top_p", np.nan), ("repetition_penalty", 0.5),
                      ("repetition_window", -1)]:
        fails(f"{name}={bad}", ValueError, f"{name}: expected", lambda: list(
            m.generate_ids([1], **{name: bad})))
    fails("a path with a zero byte", ValueError, "zero byte", m.save, "x\0.safetensors")
    fails("score in blocks of -1", ValueError, "block: expected 1", m.score, [1], -1)
    fails("log_probs in blocks of -1", ValueError, "block: expected 0", m.log_probs, [1], -1)
    fails("a memory of -1 texts", ValueError, "batch: expected 1", m.memory, -1)
    fails("a generator of -1 texts", ValueError, "batch: expected 1", m.generator, -1)
    m.params["out_emb.bias"][3] = np.nan
    fails("sampling", ValueError, "cannot sample", lambda: list(m.generate_ids([1], 1)))
    loss = m.loss([1, 2], [2, 3])
    loss.backward()
    check("gradients that are not finite", not seqtx.Optim(m).step(0.1))
    g = m.generator()
    g.close()
    g.close()
    fails("a closed generator", ValueError, "closed", g.feed, [1])
    try:
        A(31, heads=5, dim=32)
    except seqtx.Error as e:
        check("the code of an error", e.code == lib.STX_ERR_ARG)
    for name in ("bf16", "int8"):
        check(f"weights in {name}", A(300, layers=1, dim=64, heads=1).pack(name) > 0)


def vocabularies():
    with open(work("words"), "w", encoding="utf-8") as f:
        f.write("the cat and the hat\nthe déjà vu\n")
    b, c = seqtx.Vocab(), seqtx.Vocab("chars", work("words"))
    w = seqtx.Vocab("words", work("words"), min_count=2)
    for v, text in ((b, "a\u20ac\n"), (c, "the vu\n"), (w, "the <unk> the \n")):
        check(f"{v!r}: encode and decode", v.decode(v.encode(text)) == text)
        again = seqtx.Vocab.from_bytes(v.to_bytes())
        check(f"{v!r}: saved", again.kind == v.kind and len(again) == len(v)
              and list(again.encode(text)) == list(v.encode(text)))
    check("pieces", w.piece(w.find("the")) == b"the" and b.piece(0) == b"\0"
          and w.find("dog") is None)
    check("<unk> and <eos>", w.unk is not None and w.eos is not None and c.unk is None)
    fails("an unknown character", seqtx.FormatError, "vocabulary", c.encode, "Z")
    fails("an id out of range", seqtx.Error, "", b.decode, [256])
    fails("a piece out of range", IndexError, "256", b.piece, 256)
    m = seqtx.AttnSpan(c, layers=1, dim=16, heads=1, span=16)
    check("a model with a vocabulary",
          m.desc["vocab"] == len(c) and len(m.generate("the ", 5)) == 5)
    text = m.generate("the ", 400, seed=1, temperature=2, top_p=0)
    half = text[:200]
    check("stop", m.generate("the ", 400, seed=1, temperature=2, top_p=0, stop=half[-3:])
          == text[:text.index(half[-3:]) + 3])


def files():
    path = trained("attn_span", [], "0.safetensors")
    m = seqtx.open(path, threads=1)
    m.params["out_emb.bias"][:] += 0.25
    optim = seqtx.Optim(m, "adamw")
    m.loss([1, 2, 3], [2, 3, 4]).backward()
    optim.step(0.01)
    m.save(work("saved"), optim)
    n = seqtx.open(work("saved"), threads=1)
    text = TEXT[-700:]
    check("a saved model",
          n.score(text) == m.score(text) != seqtx.open(path, threads=1).score(text))
    row = run("train_attn_span", "--checkpoint", work("saved"), "--threads", "1", "--score",
              work("score")).splitlines()[1]
    check("... is read by its trainer", f"{m.score(text).nats:.6f}" == row.split("\t")[2])
    for made in (seqtx.AttnSpan(31, layers=2, dim=16, heads=2, span=9, adapt_span=1),
                 seqtx.Sru(seqtx.Vocab(), dim=16, layers=1),
                 seqtx.Compressive(31, layers=1, dim=16, heads=2, segment=8, compress="max"),
                 seqtx.Par(31, dim=16, heads=2, blocks=3, segment=8)):
        made.save(work("made"))
        again = seqtx.open(work("made"))
        check(f"a {made.family} model from arguments", again.desc == made.desc and all(
            (again.params[k] == made.params[k]).all() for k in made.params))
    check("... without a vocabulary", again.vocab is None)
    other = seqtx.Optim(n, "adamw")
    n.load(work("saved"), other)
    check("a saved optimiser", other.steps == 1)
    fails("parameters of another model", seqtx.FormatError, "the model expects shape",
          seqtx.AttnSpan(31).load, work("saved"))
    fails("another model's optimiser", ValueError, "another model", m.save, work("x"), other)
    fails("a directory that does not exist", seqtx.FileError, "", m.save, "/nowhere/x")

    search = seqtx.Par(31, blocks=2, dim=16, heads=1, segment=16)
    gates = seqtx.Optim(search, "adam", gates=True)
    loss = search.loss(*batch(0))
    loss.backward()
    check("the gates of a search", gates.step(0.01) and gates.grad_norm > 0)
    fails("no gates", ValueError, "without a pattern", seqtx.Optim, m, gates=True)
    lr = seqtx.Schedule("cosine", lr=1.0, warmup=10, total=110)
    check("a schedule", lr(5) == 0.5 and lr(10) == 1.0 and abs(lr(60) - 0.5) < 1e-12)
    check("spans", m.spans.shape == (m.desc["layers"], m.desc["heads"]))
    check("strings", "parameters" in repr(m) and "Loss" in repr(m.loss([1], [2])))


declarations()
checkpoints()
training()
gradients()
lifetimes()
threads_and_processes()
errors()
vocabularies()
files()
print(f"{len(PASSED)} passed, {len(FAILED)} failed")
sys.exit(bool(FAILED))
