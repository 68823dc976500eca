/* module.h - a PTX module after parsing and decoding: kernels, instructions, operands.
   parse.cpp fills these structures from the text, decode.cpp describes the instruction
   forms, and flow.cpp turns registers into rows before the first launch of a kernel. */
#ifndef PTX_MODULE_H
#define PTX_MODULE_H
#include "ptx.h"
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

struct machine;
struct instruction;

/* Executes an instruction for the lanes of a mask. */
typedef void execute(machine &, const instruction &, uint32_t active);


// >>types

enum type : uint8_t {
    NO_TYPE, PRED,
    B8, B16, B32, B64,
    U8, U16, U32, U64,
    S8, S16, S32, S64,
    F16, BF16, F16X2, BF16X2, TF32, F32, F64,
    TYPES
};

/* GENERIC addresses select the space by their upper byte, see memory.cpp. */
enum space : uint8_t { GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CONST };

enum rounding : uint8_t {
    NO_ROUNDING,
    NEAREST_EVEN, TOWARD_ZERO, DOWN, UP, NEAREST_AWAY,     /* .rn .rz .rm .rp .rna */
    INTEGER_EVEN, INTEGER_ZERO, INTEGER_DOWN, INTEGER_UP   /* .rni .rzi .rmi .rpi */
};

enum compare : uint8_t { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

/* How a comparison is combined with its predicate operand. */
enum combine : uint8_t { ALONE, AND, OR, XOR };

struct type_row {
    const char *name;
    uint8_t size;               /* bytes; 0 for a predicate */
    bool is_signed, is_float;
};

extern const type_row types[TYPES];

inline size_t type_size(type t) { return types[t].size; }
inline const char *type_name(type t) { return types[t].name; }
inline bool is_signed(type t) { return types[t].is_signed; }
inline bool is_float(type t) { return types[t].is_float; }
inline bool is_bits(type t) { return t >= B8 && t <= B64; }
inline bool is_integer(type t) { return t >= U8 && t <= S64; }
/* The types of moves, selections, loads and stores. */
inline bool is_basic(type t) { return is_bits(t) || is_integer(t) || t == F32 || t == F64; }


// >>forms: what an opcode with its modifiers does

/* What the interpreter does besides calling `run`. */
enum control : uint8_t {
    NEXT,           /* continue with the next instruction */
    BRANCH,
    BRANCH_INDEXED, /* brx.idx */
    CALL,           /* replaced when functions are inlined */
    RETURN,         /* of a function: replaced; of a kernel: the lanes exit */
    TRAP,
    BARRIER,        /* bar, barrier: all threads of a block */
    WARP_SYNC,      /* a .sync instruction with a membermask operand */
    ALIGNED         /* a .sync.aligned instruction: all lanes of the warp */
};

/* Counter of an instruction; the memory classes count themselves. */
enum instruction_class : uint8_t {
    IN_ARITHMETIC, IN_DOUBLE, IN_MOVE, IN_SPECIAL, IN_CONVERSION, IN_CONTROL, IN_COLLECTIVE,
    IN_SHUFFLE, IN_BARRIER, IN_MMA, IN_MEMORY,
    CLASSES
};

/* The operands of a form are described by a string. Each character is one operand:

     P p    predicate              X x    register of any width, for loads and stores
     H h    16-bit register        m      memory address: a row and a byte offset
     W w    32-bit register        i      integer, stored as it is
     L l    64-bit register        t      branch target

   Capital letters are destinations. Braces are written as in PTX; '|' is an optional
   second destination, a predicate; operands after '?' are optional. */
struct form {
    execute *run = nullptr;
    const char *operands = "";
    type to = NO_TYPE, from = NO_TYPE;  /* types of the destination and of the sources */
    ptx::space space = GENERIC;
    uint8_t count = 1;                  /* elements of a vector access or of ldmatrix */
    ptx::rounding rounding = NO_ROUNDING;
    ptx::compare compare = EQ;
    ptx::combine combine = ALONE;
    ptx::control control = NEXT;
    instruction_class counter = IN_ARITHMETIC;
    bool flush = false;                 /* .ftz */
    bool saturate = false;
    bool aligned = false;               /* all lanes execute the same barrier instruction */
    bool copies = false;                /* mov: passes on undefined values */
    bool selects = false;               /* selp: uses only one of operands 1 and 2 */
    uint8_t variant = 0;                /* meaning depends on the instruction */
    execute *inner = nullptr;           /* called by run in another rounding mode; of cvt:
                                           used if the source is in a wider register */
    uint32_t integers = 0;              /* bit n: an operand 'i' may be n; 0: any number */
    int mask_operand = -1;              /* operand that holds the membermask */
    std::string text;                   /* opcode with modifiers */
};

/* Returns the form of an opcode with its modifiers, or NULL if it is not implemented.
   Forms live as long as the program. */
const form *find_form(const std::string &opcode);


// >>instructions

/* An operand. While a kernel is parsed, it is a register number, or a constant's number
   with IS_CONSTANT. flow.cpp replaces both by the offset of a row in 32-bit words. A row
   holds one value for each of the 32 lanes; the row of a predicate is one word with one
   bit per lane. Rows of constants are in a separate bank. */
typedef uint32_t operand;

const uint32_t IS_CONSTANT = 1u << 31;
const uint32_t IS_WIDE = 1u << 30;          /* the row has 64-bit elements */
const uint32_t IS_NEGATED = 1u << 29;       /* !p */
const uint32_t ROW_MASK = (1u << 29) - 1;
const uint32_t NO_OPERAND = 0xffffffffu;

enum : uint8_t {
    GUARDED = 1,                /* @p */
    TRACKED = 2                 /* has operands that may be undefined */
};

struct instruction {
    execute *run;
    const operand *o;           /* set by flow.cpp; until then `first` is the index */
    const ptx::form *form;
    uint32_t first;
    operand guard;
    int target;                 /* branch target, or number of the table or of the call */
    uint32_t pc;                /* the instruction's own number; set by flow.cpp */
    uint32_t line;              /* line of the PTX text */
    uint32_t location;          /* index into the kernel's locations */
    uint32_t used_bytes;        /* mask of the bytes of a load that the program uses */
    uint32_t variable;          /* number of the shared variable from which the address is
                                   computed, 0 if unknown; set by variables.cpp */
    ptx::control control;
    instruction_class counter;
    uint8_t flags;
};

struct location {
    int file, line;             /* .loc */
    int caller_file, caller_line;   /* inlined_at; 0 if absent */
};


// >>kernels

/* Special registers, such as %tid.x. The order of the vectors is x, y, z. */
enum special_register : uint8_t {
    TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z,
    CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z,
    LANEID, WARPID, NWARPID, LANEMASK_EQ, LANEMASK_LT, LANEMASK_LE, LANEMASK_GT, LANEMASK_GE,
    DYNAMIC_SMEM_SIZE, TOTAL_SMEM_SIZE,
    SPECIALS
};

enum register_width : uint8_t { WIDTH_PRED, WIDTH_32, WIDTH_64 };

struct register_info {
    register_width width;
    uint8_t special;            /* SPECIALS if it is an ordinary register */
    uint32_t name;              /* index into names */
};

/* A .reg declaration. Registers of %r<100> are %r0 to %r99. */
struct register_name {
    std::string name;
    bool range;
    uint32_t first;
};

enum constant_kind : uint8_t {
    PLAIN,
    DYNAMIC_SHARED,             /* an offset from the start of dynamic shared memory */
    LOCAL_OFFSET,               /* the address of a variable in local memory */
    FORMAL                      /* the address of a function's parameter: its number */
};

struct constant {
    uint64_t value;
    register_width width;
    constant_kind kind;
    uint32_t variable;          /* number of the shared variable that it is an address of */
};

/* A variable in shared memory. Its number is its position in the list, plus 1. */
struct shared_variable {
    std::string name;
    uint32_t start, bytes;      /* not of dynamic memory: it depends on the launch */
    bool is_dynamic;
};

struct parameter {
    std::string name;
    uint32_t offset, size;
};

struct call {
    std::string callee;
    std::vector<uint32_t> actuals;  /* offsets in local memory, results first */
    uint32_t line;
};

/* A kernel or function. */
struct body {
    std::string name;
    std::vector<parameter> params;
    std::vector<instruction> code;
    std::vector<operand> operands;
    std::vector<register_info> registers;
    std::vector<register_name> names;
    std::vector<constant> constants;
    std::vector<shared_variable> shared;
    std::vector<location> locations;
    std::vector<std::vector<int>> tables;   /* of brx.idx */
    std::vector<call> calls;
    bool inlining = false;                  /* its calls are being inlined */
    uint32_t param_bytes = 0, shared_bytes = 0, dynamic_align = 16;
    uint32_t local_bytes = 0;
    unsigned max_threads = 0;               /* of .maxntid or .reqntid; 0 if unknown */
    bool exact_threads = false;             /* .reqntid */
};

std::string register_text(const body &b, uint32_t r);

inline bool is_destination(char kind) { return kind >= 'A' && kind <= 'Z'; }

/* Calls f(position, kind) for each operand of a form that is a register or a constant;
   kind is the letter in the form's description. */
template <class F> void for_operands(const form &f, F visit) {
    uint32_t position = 0;
    for (const char *p = f.operands; *p; p++) {
        if (*p == '{' || *p == '}' || *p == '|' || *p == '?' || *p == 't' || *p == 'T') continue;
        if (*p != 'i') visit(position, *p);
        position += *p == 'm' ? 2 : 1;
    }
}

/* An operand whose register is undefined on some path, so that it is checked at run
   time. */
struct tracked {
    uint32_t position;          /* in the operands; GUARD_POSITION for the guard */
    uint32_t reg;
    operand defined;            /* row of a mask: the lanes that have a value */
};

const uint32_t GUARD_POSITION = 0xffffffffu;

/* The tracked operands of an instruction, see check_tracked in warp.cpp. */
struct tracked_use {
    std::vector<tracked> uses, defs;
};

} // namespace ptx

struct ptx_kernel : ptx::body {
    const ptx_module *module = nullptr;

    /* The rest is filled by prepare (flow.cpp) before the first launch. */
    bool prepared = false;
    uint32_t row_words = 0;                 /* size of a warp's bank */
    std::vector<uint32_t> constant_rows;    /* contents of the constant bank */
    std::vector<int> reconvergence;         /* per instruction, for branches; -1: none */
    std::vector<std::pair<uint8_t, ptx::operand>> specials; /* special_register, its row */
    /* Offset and words of rows that are read before they are written. */
    std::vector<std::pair<uint32_t, uint32_t>> entry_rows;
    std::unordered_map<int, ptx::tracked_use> tracked;  /* by instruction */
    std::vector<ptx::operand> tracked_rows;

    /* Requests of each instruction, to global and to shared memory. */
    struct accesses {
        uint64_t requests, units, ideal;
    };
    mutable std::vector<accesses> accessed;

    mutable ptx_counters counters = {};
    mutable uint64_t counters_epoch = 0;    /* older than the last clear: all are 0 */
    mutable uint64_t launches = 0;
};

struct ptx_module {
    std::string target;                     /* such as sm_90 */
    unsigned architecture = 0;              /* 90 */
    std::unordered_map<int, std::string> files;
    std::vector<std::unique_ptr<ptx_kernel>> kernels;
    std::unordered_map<std::string, ptx_kernel *> by_name;
    std::vector<std::unique_ptr<unsigned char[]>> variables;    /* .global and .const */
};

namespace ptx {

/* Replaces calls by the bodies of functions. Returns an error message, or "". */
std::string inline_calls(body &b,
                         const std::unordered_map<std::string, std::unique_ptr<body>> &all);
/* Computes reconvergence points and assigns rows to registers. */
void prepare(ptx_kernel &k);
/* Finds the shared variables from which addresses are computed. */
void find_variables(body &b);

} // namespace ptx
#endif
