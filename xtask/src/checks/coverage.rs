//! Line coverage of the fuzz targets' corpora and of the tests of `pci`, written to docs/coverage.md.
//!
//! Every input of the corpora is run once, without a fuzzer, and every test of `pci`, in builds with coverage counters.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::checks::fuzz::{Fuzz, TARGET};
use crate::error::{Context, Error, Result};
use crate::fetch::apt::output;
use crate::fetch::nightly;
use crate::progress::Step;

/// The code of the crates that are measured.
const CRATES: [&str; 5] = ["machine/src/", "pci/src/", "virtio-devices/src/", "vm-api/src/", "vmm/src/"];
/// Parts of a path that only test code has.
const TEST_CODE: [&str; 4] = ["testing", "_tests", "/tests", "recording_vm"];

/// The document that is rewritten.
const DOCUMENT: &str = "docs/coverage.md";
/// Text of the document above its tables.
const HEAD: &str = "# Coverage

`cargo xtask fuzz --coverage` rewrites this file. Only lines that are compiled into the measured
programs count, so a file has fewer lines here than in an editor. Files without a line that is run
are left out, and so is code for tests.
";
/// Text above the table of the fuzz targets.
const FUZZ: &str = "
## Fuzz targets

Every input under `fuzz/corpus` is run once. On a fresh checkout the corpora are the seeds alone;
`cargo xtask fuzz --time 600` grows them first. Backends, KVM and threads are not fuzzed.
";
/// Text above the table of the tests of `pci`.
const TESTS: &str = "
## Tests of `pci`

Every unit, property and conformance test of the crate is run once.
";

/// The coverage of one file.
#[derive(Debug, PartialEq, Eq)]
struct File {
    /// Path in the checkout.
    path: String,
    /// Lines with code.
    lines: u64,
    /// Lines that an input reaches.
    reached: u64,
}

/// Measures both and rewrites [`DOCUMENT`].
pub(crate) fn write(workspace: &Path) -> Result<()> {
    let fuzz = Fuzz::prepare(workspace)?;
    let measure =
        Measure { tools: nightly::llvm_tools()?, target: fuzz.folder().join("target/coverage"), workspace, fuzz };
    let (inputs, reached) = measure.corpora()?;
    let (programs, run) = measure.tests_of_pci()?;
    let text = [HEAD.to_string(), table(FUZZ, &inputs, &reached), table(TESTS, &programs, &run)].concat();
    fs::write(workspace.join(DOCUMENT), text).context(format!("writing {DOCUMENT}"))?;
    println!("{DOCUMENT} is rewritten");
    Ok(())
}

/// Resources of a measurement.
struct Measure<'a> {
    fuzz: Fuzz,
    /// The folder of llvm-cov and llvm-profdata.
    tools: PathBuf,
    /// The folder of the builds.
    target: PathBuf,
    workspace: &'a Path,
}

impl Measure<'_> {
    /// Lines that the corpora reach, and the number of their inputs, in words.
    fn corpora(&self) -> Result<(String, Vec<File>)> {
        let step = Step::begin("build", "the fuzz targets, with coverage counters");
        output(self.cargo().args(["build", "--release", "--bin", "seeds", "--bin", "replay"]))?;
        step.done();
        let (corpus, programs) = (self.fuzz.folder().join("corpus"), self.target.join(TARGET).join("release"));
        output(Command::new(programs.join("seeds")).arg(&corpus).env("LLVM_PROFILE_FILE", "/dev/null"))?;
        let step = Step::begin("run", "the corpora");
        let (raw, replay) = (self.target.join("replay.profraw"), programs.join("replay"));
        let inputs = output(Command::new(&replay).arg(&corpus).env("LLVM_PROFILE_FILE", &raw))?;
        step.done_with(inputs.trim());
        Ok((inputs.trim().to_string(), self.files(&[raw], &[replay])?))
    }

    /// Lines that the tests of `pci` run, and the number of their programs, in words.
    fn tests_of_pci(&self) -> Result<(String, Vec<File>)> {
        let step = Step::begin("build", "the tests of pci, with coverage counters");
        let mut build = self.cargo();
        build.current_dir(self.workspace.join("pci")).args(["test", "--lib", "--tests", "--no-run"]);
        let programs = executables(&output(build.args(["--message-format", "json"]))?);
        step.done();
        let step = Step::begin("run", "the tests of pci");
        let raw = |n: usize| self.target.join(format!("pci-{n}.profraw"));
        for (n, program) in programs.iter().enumerate() {
            let mut test = Command::new(program);
            output(test.current_dir(self.workspace.join("pci")).env("LLVM_PROFILE_FILE", raw(n)))?;
        }
        let count = format!("{} test programs", programs.len());
        step.done_with(&count);
        Ok((count, self.files(&(0..programs.len()).map(raw).collect::<Vec<_>>(), &programs)?))
    }

    /// The toolchain's cargo, with coverage counters in what it builds.
    fn cargo(&self) -> Command {
        let mut cargo = self.fuzz.cargo();
        // Without a target, RUSTFLAGS would also apply to build scripts and macros, which would be counted.
        cargo.env("RUSTFLAGS", "-C instrument-coverage").env("CARGO_BUILD_TARGET", TARGET);
        cargo.env("CARGO_TARGET_DIR", &self.target);
        cargo
    }

    /// The files that `programs` ran, according to the counters in `raw`.
    fn files(&self, raw: &[PathBuf], programs: &[PathBuf]) -> Result<Vec<File>> {
        let profile = self.target.join("merged.profdata");
        output(Command::new(self.tools.join("llvm-profdata")).args(["merge", "-o"]).arg(&profile).args(raw))?;
        let mut export = Command::new(self.tools.join("llvm-cov"));
        export.args(["export", "--summary-only", "--instr-profile"]).arg(profile);
        for program in programs {
            export.arg("--object").arg(program);
        }
        files(&output(&mut export)?, self.workspace)
    }
}

/// The programs in the messages of a build.
fn executables(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter_map(|message| Some(message.get("executable")?.as_str()?.into())).collect()
}

/// A section of the document, after running `what`.
fn table(head: &str, what: &str, files: &[File]) -> String {
    let mut text = format!("{head}\n{what}:\n\n| file | lines | run |\n|---|---|---|\n");
    for File { path, lines, reached } in files.iter().filter(|file| file.reached > 0) {
        text += &format!("| `{path}` | {lines} | {:.1} % |\n", 100.0 * *reached as f64 / *lines as f64);
    }
    let all = |count: fn(&File) -> u64| files.iter().filter(|file| file.reached > 0).map(count).sum::<u64>();
    let (lines, reached) = (all(|file| file.lines), all(|file| file.reached));
    text + &format!("| all | {lines} | {:.1} % |\n", 100.0 * reached as f64 / lines.max(1) as f64)
}

/// The files of the crates in the output of `llvm-cov export`, by path.
fn files(report: &str, workspace: &Path) -> Result<Vec<File>> {
    let report: Value = serde_json::from_str(report).context("parsing the output of llvm-cov")?;
    let files = report.pointer("/data/0/files").and_then(Value::as_array);
    let files = files.ok_or_else(|| Error::new("the output of llvm-cov names no files"))?;
    let file = |file: &Value| {
        let path = Path::new(file.get("filename")?.as_str()?).strip_prefix(workspace).ok()?.to_str()?.to_owned();
        let count = |what: &str| file.pointer("/summary/lines")?.get(what)?.as_u64();
        let is_measured = CRATES.iter().any(|folder| path.starts_with(folder));
        let ours = is_measured && !TEST_CODE.iter().any(|part| path.contains(part));
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
    fn a_table_has_a_row_for_each_file_that_is_run_and_their_sum() {
        let file = |path: &str, lines, reached| File { path: path.into(), lines, reached };
        let files = [file("pci/src/bar.rs", 8, 7), file("vmm/src/vm.rs", 5, 0), file("pci/src/id.rs", 2, 2)];
        let rows = "| `pci/src/bar.rs` | 8 | 87.5 % |\n| `pci/src/id.rs` | 2 | 100.0 % |\n| all | 10 | 90.0 % |\n";
        assert!(table(FUZZ, "7 inputs", &files).ends_with(&format!("|---|---|---|\n{rows}")));
        let checked_in = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(DOCUMENT)).unwrap();
        let generated = checked_in.starts_with(HEAD) && checked_in.contains(FUZZ) && checked_in.contains(TESTS);
        assert!(generated, "{DOCUMENT} is generated: cargo xtask fuzz --coverage");
    }

    #[test]
    fn the_programs_of_a_build_are_found_in_its_messages() {
        let messages = "{\"executable\":null}\nnote\n{\"executable\":\"/t/a-1\"}\n{\"reason\":\"build-finished\"}\n";
        assert_eq!(executables(messages), [PathBuf::from("/t/a-1")]);
    }

    #[test]
    fn the_table_has_the_files_of_the_crates_by_path() {
        let report = r#"{"data":[{"files":[
            {"filename":"/w/virtio-devices/src/net.rs","summary":{"lines":{"count":8,"covered":2}}},
            {"filename":"/w/fuzz/src/lib.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/w/pci/src/testing.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/w/pci/src/sriov_tests.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/registry/pci/src/lib.rs","summary":{"lines":{"count":5,"covered":5}}},
            {"filename":"/w/pci/src/bar.rs","summary":{"lines":{"count":10,"covered":9}}}]}]}"#;
        let file = |path: &str, lines, reached| File { path: path.into(), lines, reached };
        let expected = [file("pci/src/bar.rs", 10, 9), file("virtio-devices/src/net.rs", 8, 2)];
        assert_eq!(files(report, Path::new("/w")).unwrap(), expected);
        assert!(files("{}", Path::new("/w")).is_err());
    }
}
