/* parse.h - the parser of PTX text. parse.cpp reads modules, kernels and directives, and
   parse_code.cpp instructions with their operands. */
#ifndef PTX_PARSE_H
#define PTX_PARSE_H
#include "lexer.h"

namespace ptx {

enum { MAX_REGISTERS = 1 << 20, MAX_ALIGN = 1 << 12 };
enum { MAX_BYTES = 1 << 28, MAX_LOCAL_BYTES = 512 << 10, MAX_PARAM_BYTES = 32764 };

struct variable {
    std::string name;
    ptx::space space;
    uint64_t address;
    constant_kind kind;
    uint32_t bytes, align;
    uint32_t number;            /* of a shared variable of the body, or 0 */
};

/* A label that is not known yet, and where its number belongs. */
struct fixup {
    word label;
    unsigned line;
    int instruction, table, entry;  /* table -1: the instruction's target */
};

struct parser : lexer {
    ptx_module *module;
    std::vector<variable> globals;
    std::unordered_map<std::string, std::unique_ptr<body>> functions;
    std::unordered_map<word, const form *> forms;

    /* The body that is being parsed. */
    body *b;
    bool is_function;
    std::vector<variable> locals;
    std::vector<uint32_t> scopes;               /* counts of names at each '{' */
    std::vector<std::pair<uint32_t, uint32_t>> visible;     /* index of name, its count */
    std::unordered_map<word, int> labels;
    std::vector<fixup> fixups;
    std::unordered_map<uint64_t, uint32_t> constants[3];    /* by width */
    std::unordered_map<std::string, uint32_t> specials;
    std::unordered_map<std::string, uint32_t> placed;       /* numbers of shared variables */
    std::unordered_map<word, int> tables;
    uint32_t sinks[3];
    uint32_t used_bytes;

    void parse_module();
    void parse_file();
    void parse_target();
    void parse_module_variable(word directive);
    void parse_function(word directive);
    void parse_parameters();
    void parse_limits();
    void begin_body();
    void parse_body();
    void parse_directive();
    void parse_registers();
    void parse_local_variable(ptx::space s);
    void parse_location();
    void parse_pragma();
    void parse_instruction();
    void parse_call(instruction &i);
    void parse_operands(instruction &i, const form &f);
    bool source_is_wider(const form &f, operand o);
    void parse_operand(char kind, type t, uint32_t integers);
    void parse_address();
    void parse_target_label(instruction &i, char kind);
    void parse_label_or_instruction();
    void resolve_labels();
    const form *form_of(word opcode);
    std::string operand_suffix(word opcode);
    operand parse_register(char kind);
    bool find_register(word name, uint32_t *r);
    operand special(word name);
    operand constant_operand(uint64_t value, register_width width, constant_kind kind,
                             uint32_t variable = 0);
    operand address_of(word name, int64_t offset, register_width width);
    operand sink(char kind);
    const variable *find_variable(word name);
    uint32_t add_shared(const variable &v);
    uint32_t place_shared(const variable &v);
    type parse_type(word text);
    uint32_t parse_alignment();
    uint32_t parse_size(uint32_t bytes);
    void reserve_bytes(uint32_t *used, uint32_t align, uint32_t bytes, uint32_t limit);
    bool address_is_local();
    void check_width(operand o, char kind, word name);
};

inline uint32_t align_up(uint32_t n, uint32_t align) { return (n + align - 1) / align * align; }

inline type type_of(word name) {
    for (int t = PRED; t < TYPES; t++)
        if (name == type_name((type)t)) return (type)t;
    return NO_TYPE;
}

inline register_width width_of(type t) {
    if (t == PRED) return WIDTH_PRED;
    return type_size(t) == 8 ? WIDTH_64 : WIDTH_32;
}

} // namespace ptx
#endif
