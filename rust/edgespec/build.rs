//! A library of EDGESPEC_LIBRARY_DIR is also found at run time, by this crate's tests.
fn main() {
    println!("cargo:rerun-if-env-changed=EDGESPEC_LIBRARY_DIR");
    if let (Ok(folder), Ok(_)) = (std::env::var("EDGESPEC_LIBRARY_DIR"), std::env::var("CARGO_CFG_UNIX")) {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
