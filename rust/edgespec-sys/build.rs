//! Compiles the C++ sources into a static library, with the files and flags of CMakeLists.txt, which also builds the
//! Python package. EDGESPEC_LIBRARY_DIR names a folder of a library that is built already.
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-env-changed=EDGESPEC_LIBRARY_DIR");
    if let Ok(folder) = env::var("EDGESPEC_LIBRARY_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-lib=dylib=edgespec");
        return;
    }
    // in the repository, where the links next to this file need not be links; else the copies in the package
    let repository = Path::new("../../edgespec/runtimes/native").is_dir();
    let root = Path::new(if repository { "../.." } else { "." });
    let native = if repository { root.join("edgespec/runtimes/native") } else { root.join("native") };
    println!("cargo:rerun-if-changed={}", native.display());
    println!("cargo:rerun-if-changed={}", root.join("CMakeLists.txt").display());
    let cmake = fs::read_to_string(root.join("CMakeLists.txt")).expect("CMakeLists.txt");
    let mut all = base();
    for name in listed(&cmake, "FILES").filter(|&name| name != "jni") {
        all.file(native.join(format!("{name}.cpp")));
    }
    for isa in listed(&cmake, "ISAS") {
        let mut one = base();
        let flags = flags(&cmake, isa);
        if flags.iter().all(|flag| one.is_flag_supported(flag).unwrap_or(false)) {
            for flag in flags {
                one.flag(flag);
            }
        }
        for object in one.file(native.join(format!("isa_{isa}.cpp"))).compile_intermediates() {
            all.object(object);
        }
    }
    all.compile("edgespec");
}

fn base() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(3).define("EDGESPEC_BUILDING", None);
    build.define("EDGESPEC_VERSION", Some(concat!("\"", env!("CARGO_PKG_VERSION"), "\"")));
    // contracting a * b + c would give every instruction set its own rounding
    build.flag("-ffp-contract=off").flag_if_supported("-fvisibility=hidden").warnings(false);
    build
}

fn listed<'a>(cmake: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!("set({name} ");
    let line = cmake.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_else(|| panic!("no list {name}"));
    line.trim_end_matches(')').split_whitespace()
}

/// The flags of an instruction set; none where it is another processor's, whose file is then empty.
fn flags<'a>(cmake: &'a str, isa: &str) -> Vec<&'a str> {
    let here = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => isa.starts_with("avx"),
        Ok("aarch64") => matches!(isa, "neon" | "i8mm"),
        _ => false,
    };
    let start = format!("edgespec_flags({isa} ");
    let line = cmake.lines().find_map(|line| line.trim_start().strip_prefix(&start)).filter(|_| here);
    line.map(|line| line.trim_end_matches(')').split_whitespace().collect::<Vec<&str>>()).unwrap_or_default()
}
