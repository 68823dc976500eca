# find_package(seqtx): a target for each header. They compile nothing: one source file of yours defines SEQTX_IMPLEMENTATION before its
# #include, as examples/embed/seqtx.c does.
#   seqtx::core         seqtx.h, and seqtx_text.h
#   seqtx::attn_span, seqtx::compressive, seqtx::par, seqtx::sru      a family and the core
#   seqtx::cuda         seqtx_cuda.cu, which becomes part of the target that links it; needs project(.. LANGUAGES .. CUDA).
#                       find_package(seqtx COMPONENTS cuda) where a program cannot do without
# The same file serves an installed package (its headers are in <prefix>/include/seqtx) and the source tree, by CMakeLists.txt.
if(NOT seqtx_include_dir)
    get_filename_component(seqtx_include_dir "${CMAKE_CURRENT_LIST_DIR}/../../../include/seqtx" ABSOLUTE)
    set(seqtx_include_dirs "${seqtx_include_dir}")
endif()
get_property(seqtx_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if(NOT "C" IN_LIST seqtx_languages AND NOT "CXX" IN_LIST seqtx_languages)
    set(seqtx_FOUND FALSE)
    set(seqtx_NOT_FOUND_MESSAGE "seqtx needs a project whose languages include C or CXX")
    return()
endif()
find_package(Threads REQUIRED)

if(NOT TARGET seqtx::core)
    add_library(seqtx::core INTERFACE IMPORTED GLOBAL)
    set(seqtx_libraries Threads::Threads)
    if(UNIX)
        list(APPEND seqtx_libraries m)
    endif()
    set_target_properties(seqtx::core PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${seqtx_include_dirs}" INTERFACE_LINK_LIBRARIES "${seqtx_libraries}")
    foreach(seqtx_family attn_span compressive par sru)
        add_library(seqtx::${seqtx_family} INTERFACE IMPORTED GLOBAL)
        set_target_properties(seqtx::${seqtx_family} PROPERTIES INTERFACE_LINK_LIBRARIES seqtx::core)
        set(seqtx_${seqtx_family}_FOUND TRUE)
    endforeach()
endif()
set(seqtx_core_FOUND TRUE)

# gcc's vector code for Windows needs this of the assembler (seqtx.h, >>loops); without it portable loops run
if(MINGW AND (CMAKE_C_COMPILER_ID STREQUAL "GNU" OR CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
    if("C" IN_LIST seqtx_languages)
        include(CheckCCompilerFlag)
        check_c_compiler_flag(-Wa,-muse-unaligned-vector-move SEQTX_UNALIGNED_MOVES)
    else()
        include(CheckCXXCompilerFlag)
        check_cxx_compiler_flag(-Wa,-muse-unaligned-vector-move SEQTX_UNALIGNED_MOVES)
    endif()
    if(SEQTX_UNALIGNED_MOVES)
        set_target_properties(seqtx::core PROPERTIES INTERFACE_COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:C,CXX>:-Wa,-muse-unaligned-vector-move>")
    endif()
endif()

if("CUDA" IN_LIST seqtx_languages AND NOT TARGET seqtx::cuda)
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
        add_library(seqtx::cuda INTERFACE IMPORTED GLOBAL)
        set_target_properties(seqtx::cuda PROPERTIES
            INTERFACE_COMPILE_DEFINITIONS SEQTX_CUDA
            INTERFACE_SOURCES "${seqtx_include_dir}/seqtx_cuda.cu"
            INTERFACE_LINK_LIBRARIES "seqtx::core;CUDA::cublasLt;CUDA::cudart")
    endif()
endif()
if(TARGET seqtx::cuda)
    set(seqtx_cuda_FOUND TRUE)
endif()

foreach(seqtx_component IN LISTS seqtx_FIND_COMPONENTS)
    if(NOT seqtx_${seqtx_component}_FOUND AND seqtx_FIND_REQUIRED_${seqtx_component})
        set(seqtx_FOUND FALSE)
        set(seqtx_NOT_FOUND_MESSAGE "no component ${seqtx_component}: there are core, attn_span, compressive, par, sru, and cuda where the CUDA language is enabled (project(.. LANGUAGES C CXX CUDA)) and its toolkit found")
    endif()
endforeach()
