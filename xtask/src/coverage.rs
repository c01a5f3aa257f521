//! How much of each file the corpora of the fuzz targets reach: they are run once, without a fuzzer, in a build that counts.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::apt::output;
use crate::error::{Context, Error, Result};
use crate::fuzz::{Fuzz, TARGET};
use crate::progress::Step;

/// Where the crates that are fuzzed have their code. What of it is there for tests is left out.
const CRATES: [&str; 3] = ["pci/src/", "virtio-devices/src/", "vmm/src/"];

/// The lines of a file.
#[derive(Debug, PartialEq, Eq)]
struct File {
    /// Its path in the checkout.
    path: String,
    /// Lines with code.
    lines: u64,
    /// Those of them that were run.
    reached: u64,
}

/// Prints a table: each file that the corpora reach, and the share of its lines that they run.
pub fn print(workspace: &Path) -> Result<()> {
    let fuzz = Fuzz::prepare(workspace)?;
    let tools = fuzz.llvm_tools()?;
    let target = fuzz.folder().join("target/coverage");
    let step = Step::begin("build", "the fuzz targets, to count lines");
    let mut build = fuzz.cargo();
    // With a target named, the flags are not those of build scripts and macros, which would count, too.
    build.args(["build", "--release", "--bin", "seeds", "--bin", "replay", "--target", TARGET, "--target-dir"]);
    build.arg(&target);
    output(build.env("RUSTFLAGS", "-C instrument-coverage"))?;
    step.done();

    let corpus = fuzz.folder().join("corpus");
    let program = |name: &str| target.join(TARGET).join("release").join(name);
    let (raw, profile) = (target.join("replay.profraw"), target.join("replay.profdata"));
    output(Command::new(program("seeds")).arg(&corpus).env("LLVM_PROFILE_FILE", "/dev/null"))?;
    let step = Step::begin("run", "the corpora");
    let inputs = output(Command::new(program("replay")).arg(&corpus).env("LLVM_PROFILE_FILE", &raw))?;
    step.done_with(inputs.trim());
    output(Command::new(tools.join("llvm-profdata")).args(["merge", "-o"]).args([&profile, &raw]))?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export.args(["export", "--summary-only", "--instr-profile"]).args([&profile, &program("replay")]);
    let files = files(&output(&mut export)?, workspace)?;

    println!("| file | lines | reached |\n|---|---|---|");
    for File { path, lines, reached } in files.iter().filter(|file| file.reached > 0) {
        println!("| `{path}` | {lines} | {:.1} % |", 100.0 * *reached as f64 / *lines as f64);
    }
    Ok(())
}

/// The files of the crates in what `llvm-cov export` says, by path.
fn files(report: &str, workspace: &Path) -> Result<Vec<File>> {
    let report: Value = serde_json::from_str(report).context("reading what llvm-cov says")?;
    let files = report.pointer("/data/0/files").and_then(Value::as_array);
    let files = files.ok_or_else(|| Error::new("llvm-cov names no files"))?;
    let file = |file: &Value| {
        let path = Path::new(file.get("filename")?.as_str()?).strip_prefix(workspace).ok()?.to_str()?.to_owned();
        let count = |what: &str| file.pointer("/summary/lines")?.get(what)?.as_u64();
        let ours = CRATES.iter().any(|folder| path.starts_with(folder)) && !path.contains("testing");
        Some(File { path, lines: count("count")?, reached: count("covered")? }).filter(|_| ours)
    };
    let mut files: Vec<File> = files.iter().filter_map(file).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_files_of_the_crates_by_path() {
        let report = r#"{"data":[{"files":[
            {"filename":"/w/virtio-devices/src/net.rs","summary":{"lines":{"count":8,"covered":2}}},
            {"filename":"/w/fuzz/src/lib.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/w/pci/src/testing.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/registry/pci/src/lib.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/w/pci/src/bar.rs","summary":{"lines":{"count":10,"covered":9}}}]}]}"#;
        let file = |path: &str, lines, reached| File { path: path.into(), lines, reached };
        let expected = [file("pci/src/bar.rs", 10, 9), file("virtio-devices/src/net.rs", 8, 2)];
        assert_eq!(files(report, Path::new("/w")).unwrap(), expected);
        assert!(files("{}", Path::new("/w")).is_err());
    }
}
