"""Build backend of pyproject.toml (PEP 517), without other packages: compiles the shared
library and writes a wheel, which is a zip file.

The compiler is CC of the environment, or the first of cc, gcc and clang. Where there is
none, pip first installs ziglang, whose `zig cc` is clang. CPPFLAGS, CFLAGS and LDFLAGS of
the environment are added to the commands.
"""
import base64
import concurrent.futures
import hashlib
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python", "seqtx"))
from _library import LIBRARY_NAME, read_api      # noqa: E402

API = read_api(ROOT)
VERSION = API["version"]
NAME = f"seqtx-{VERSION}"
INFO = f"{NAME}.dist-info"


def read(path):
    with open(os.path.join(ROOT, path), "rb") as f:
        return f.read()


def project():
    """The table [project] of pyproject.toml, whose values are also JSON."""
    table = read("pyproject.toml").decode().split("\n[project]\n")[1].split("\n[")[0]
    return {key: json.loads(value) for key, value in re.findall(r"(?m)^([\w-]+) = (.*)$", table)}


def metadata():
    p = project()
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {VERSION}",
             f"Summary: {p['description']}", f"License: {p['license']}",
             f"Requires-Python: {p['requires-python']}"]
    lines += [f"Requires-Dist: {d}" for d in p["dependencies"]]
    lines += [f"License-File: {f}" for f in p["license-files"]]
    lines += ["Description-Content-Type: text/markdown", ""]
    return "\n".join(lines).encode() + b"\n" + read(p["readme"])


def compiler():
    """The command of the C compiler, or None."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def mac_target():
    """The version of macOS and the processor for which the library is compiled."""
    arch = platform.machine()
    return os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0" if arch == "arm64" else "10.13"), arch


def platform_tag():
    tag = sysconfig.get_platform()
    if sys.platform == "darwin":
        tag = "macosx-{}-{}".format(*mac_target())
    return re.sub(r"[-.]", "_", tag)


def compile_library(target):
    """Compiles each header to an object, all at once, and links them."""
    cc = compiler()
    if not cc:
        raise SystemExit("seqtx needs a C compiler to build: install one, name it with CC, or "
                         "`pip install ziglang`")
    windows = sys.platform == "win32"
    export = "__declspec(dllexport)" if windows else '__attribute__((visibility("default")))'
    flags = ["-std=c99", "-O3", f"-DSEQTX_API={export}"]
    if windows and "gcc" in os.path.basename(cc[0]):    # the stack is not aligned for vectors
        flags.append("-Wa,-muse-unaligned-vector-move")
    if not windows:
        flags += ["-fPIC", "-fvisibility=hidden", "-pthread"]
    if sys.platform == "darwin":
        flags.append(f"-mmacosx-version-min={mac_target()[0]}")
    own = [shlex.split(os.environ.get(v, "")) for v in ("CPPFLAGS", "CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as work:
        def compile_header(header):
            name = header[:-2]
            macro = (name + "_IMPLEMENTATION").upper()
            made = os.path.join(work, name + ".o")
            subprocess.check_call(cc + flags + own[0] + own[1] + [
                f"-I{ROOT}", f"-D{macro}", "-x", "c", "-c", os.path.join(ROOT, header), "-o", made])
            return made

        headers = [f for f in os.listdir(ROOT) if re.fullmatch(r"seqtx(_\w+)?\.h", f)]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_header, headers))
        subprocess.check_call(cc + flags + own[1] + ["-shared"] + own[2] + objects
                              + ["-o", target, "-lm"])


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = f"{NAME}-py3-none-{platform_tag()}.whl"
    files = {}
    for f in sorted(os.listdir(os.path.join(ROOT, "python", "seqtx"))):
        if f.endswith((".py", ".typed")):
            files["seqtx/" + f] = read("python/seqtx/" + f)
    files["seqtx/api.json"] = json.dumps(API).encode()
    with tempfile.TemporaryDirectory() as work:
        compile_library(os.path.join(work, LIBRARY_NAME))
        with open(os.path.join(work, LIBRARY_NAME), "rb") as f:
            files["seqtx/" + LIBRARY_NAME] = f.read()
    files[INFO + "/LICENSE"] = read("LICENSE")
    files[INFO + "/METADATA"] = metadata()
    files[INFO + "/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: seqtx_build {VERSION}\n"
                              f"Root-Is-Purelib: false\nTag: py3-none-{platform_tag()}\n").encode()
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[INFO + "/RECORD"] = f"{record}{INFO}/RECORD,,\n".encode()
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as z:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)           # of 1980: wheels can be compared
            entry.external_attr = (0o755 if path.endswith(LIBRARY_NAME) else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
    return name


def get_requires_for_build_wheel(config_settings=None):
    return [] if compiler() else ["ziglang"]


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    os.mkdir(os.path.join(metadata_directory, INFO))
    with open(os.path.join(metadata_directory, INFO, "METADATA"), "wb") as f:
        f.write(metadata())
    return INFO


def build_sdist(sdist_directory, config_settings=None):
    """The files that a wheel is built from."""
    name = NAME + ".tar.gz"
    paths = ["pyproject.toml", "LICENSE", project()["readme"], "python/seqtx_build.py"]
    paths += sorted(f for f in os.listdir(ROOT) if re.fullmatch(r"seqtx(_\w+)?\.h", f))
    paths += sorted("python/seqtx/" + f for f in os.listdir(os.path.join(ROOT, "python", "seqtx"))
                    if f.endswith((".py", ".typed")))
    with tarfile.open(os.path.join(sdist_directory, name), "w:gz", format=tarfile.PAX_FORMAT) as t:
        for path, data in [("PKG-INFO", metadata())] + [(p, read(p)) for p in paths]:
            entry = tarfile.TarInfo(f"{NAME}/{path}")
            entry.size = len(data)
            t.addfile(entry, io.BytesIO(data))
    return name
