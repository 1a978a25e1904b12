//! Links the library of native operators, from the folder that EDGESPEC_LIBRARY_DIR names.
fn main() {
    println!("cargo:rerun-if-env-changed=EDGESPEC_LIBRARY_DIR");
    if let Ok(folder) = std::env::var("EDGESPEC_LIBRARY_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        if std::env::var("CARGO_CFG_UNIX").is_ok() {
            println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
        }
    }
    println!("cargo:rustc-link-lib=dylib=edgespec");
}
