"""Packages the checkout that contains this recipe, for Conan 2:

    conan create package/conan
"""
import os
import re

from conan import ConanFile
from conan.tools.files import copy, load


class Seqtx(ConanFile):
    name = "seqtx"
    description = "Long-context sequence models in single C headers"
    license = "MIT OR Unlicense"
    topics = ("language-model", "transformer", "sru", "header-only")
    package_type = "header-library"
    settings = "os", "compiler"
    no_copy_source = True

    def _top(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._top(), "seqtx.h"))
        self.version = re.search(r'#define STX_VERSION +"(.*?)"', header).group(1)

    def export_sources(self):
        for pattern in ("seqtx*.h", "seqtx_cuda.cu", "LICENSE"):
            copy(self, pattern, self._top(), self.export_sources_folder, excludes="*/*")

    def package_id(self):
        self.info.clear()

    def package(self):
        copy(self, "seqtx*", self.source_folder, os.path.join(self.package_folder, "include/seqtx"))
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        core = self.cpp_info.components["core"]
        core.includedirs, core.libdirs, core.bindirs = ["include/seqtx"], [], []
        if self.settings.os in ("Linux", "FreeBSD"):
            core.system_libs = ["m", "pthread"]
        if self.settings.os == "Windows" and self.settings.compiler == "gcc":
            core.cflags = core.cxxflags = ["-Wa,-muse-unaligned-vector-move"]
        for family in ("attn_span", "compressive", "par", "sru"):
            component = self.cpp_info.components[family]
            component.includedirs, component.libdirs, component.bindirs = [], [], []
            component.requires = ["core"]
