# Installs the checkout that contains this port:
#   vcpkg install seqtx --overlay-ports=package/vcpkg
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(VCPKG_BUILD_TYPE release)           # headers, and programs that nothing links
vcpkg_check_features(OUT_FEATURE_OPTIONS options FEATURES tools SEQTX_BUILD_TRAINERS)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS ${options} -DSEQTX_CMAKE_DIR=share/${PORT})
vcpkg_cmake_install()
if("tools" IN_LIST FEATURES)
    vcpkg_copy_tools(AUTO_CLEAN TOOL_NAMES train_attn_span train_compressive train_par train_sru
        seqtx-plot)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
