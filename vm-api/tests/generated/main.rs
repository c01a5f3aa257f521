//! Generated texts that are checked in: schemas of the API, and tables of keys and counters.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod counters;
mod openapi;
mod tables;

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Set by `cargo xtask generate`: files are written, not compared.
const REWRITE: &str = "REWRITE_GENERATED_FILES";

/// Compares a file of the repository with `generate(its text)`, or writes it.
fn check(file: &str, generate: impl Fn(&str) -> String) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let text = fs::read_to_string(&path).unwrap();
    let generated = generate(&text);
    if env::var_os(REWRITE).is_some() {
        fs::write(&path, generated).unwrap();
        return;
    }
    let differs = text.lines().zip(generated.lines()).position(|(old, new)| old != new);
    let line = differs.unwrap_or_else(|| text.lines().count().min(generated.lines().count())) + 1;
    assert!(text == generated, "{file}:{line} is stale; run cargo xtask generate");
}
