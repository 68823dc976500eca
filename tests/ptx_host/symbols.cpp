/* symbols.cpp - finds the name of a function in the symbol table of the program's ELF
   file. dladdr does not know static functions, and kernels are static. */
#include "symbols.h"
#include <cxxabi.h>
#include <elf.h>
#include <fstream>
#include <iterator>
#include <link.h>
#include <map>
#include <stdlib.h>
#include <string.h>
#include <vector>

static std::vector<char> read_file(const char *path) {
    std::ifstream in(path, std::ios::binary);
    return std::vector<char>(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

/* Stores the address at which the program itself is loaded. It is the first object that
   dl_iterate_phdr reports. */
static int first_object(struct dl_phdr_info *info, size_t, void *base) {
    *(uintptr_t *)base = info->dlpi_addr;
    return 1;
}

/* Reads the functions of one symbol table. */
static void read_table(const std::vector<char> &file, const Elf64_Shdr &table,
                       const Elf64_Shdr &strings, uintptr_t base,
                       std::map<uintptr_t, std::string> *names) {
    if (table.sh_offset + table.sh_size > file.size()) return;
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= table.sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym s;
        memcpy(&s, file.data() + table.sh_offset + at, sizeof s);
        if (ELF64_ST_TYPE(s.st_info) != STT_FUNC || !s.st_value) continue;
        size_t name = strings.sh_offset + s.st_name;
        if (name < file.size()) names->emplace(base + s.st_value, file.data() + name);
    }
}

static std::map<uintptr_t, std::string> read_names(void) {
    std::map<uintptr_t, std::string> names;
    std::vector<char> file = read_file("/proc/self/exe");
    Elf64_Ehdr head;
    uintptr_t base = 0;
    if (file.size() < sizeof head) return names;
    memcpy(&head, file.data(), sizeof head);
    if (memcmp(head.e_ident, ELFMAG, SELFMAG) || head.e_ident[EI_CLASS] != ELFCLASS64)
        return names;
    dl_iterate_phdr(first_object, &base);

    std::vector<Elf64_Shdr> section(head.e_shnum);
    if (head.e_shoff + section.size() * sizeof(Elf64_Shdr) > file.size()) return names;
    memcpy(section.data(), file.data() + head.e_shoff, section.size() * sizeof(Elf64_Shdr));
    for (const Elf64_Shdr &s : section)
        if (s.sh_type == SHT_SYMTAB && s.sh_link < section.size())
            read_table(file, s, section[s.sh_link], base, &names);
    return names;
}

std::string symbol_demangle(const char *mangled) {
    int status = 1;
    char *text = abi::__cxa_demangle(mangled, NULL, NULL, &status);
    if (status != 0 || !text) return "";
    std::string name = text;
    free(text);
    /* Functions that are instances of templates have a return type, such as "void ". That
       of the host's kernels encodes their launch bounds (cuda_runtime.h). The name begins
       after the last blank outside of brackets before the parameters. */
    size_t start = 0;
    int depth = 0;
    for (size_t i = 0; i < name.size() && (depth || name[i] != '('); i++) {
        if (strchr("<([{", name[i])) depth++;
        if (strchr(">)]}", name[i])) depth--;
        if (!depth && name[i] == ' ') start = i + 1;
    }
    name.erase(0, start);
    return name;
}

std::string symbol_name(const void *function) {
    static const std::map<uintptr_t, std::string> names = read_names();
    auto i = names.find((uintptr_t)function);
    return i == names.end() ? "" : symbol_demangle(i->second.c_str());
}
