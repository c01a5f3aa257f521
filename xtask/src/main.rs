//! The developer's and the newcomer's front door: `cargo xtask demo`, `cargo xtask test`, `cargo xtask fuzz`, `cargo xtask lab`.
//!
//! It fetches kernels and tools as packages, builds what runs in the lab, and runs it on this machine's own KVM or, where
//! that cannot run a stock kernel, in a first-level machine under emulation. It knows nothing of the VMM's inside.

mod apt;
mod bench;
mod boot_time;
mod build;
mod check;
mod contract;
mod coverage;
mod cpio;
mod debian;
mod demo;
mod dist;
mod emulator;
mod error;
mod fuzz;
mod hotplug;
mod images;
mod kernel;
mod lab;
mod nested;
mod place;
mod progress;
mod sources;
mod splice;
mod stress;
mod suite;
mod vp_vdpa;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};

use error::{Error, Result};
use lab::Lab;
use place::Place;
use progress::{note, seconds};
use suite::{Suite, Tally};

/// How long a command of `cargo xtask lab run` may take.
const RUN_LIMIT: Duration = Duration::from_secs(3600);
/// How many random questions the contract tests ask, beyond those that follow from the API's description.
const QUESTIONS: usize = 320;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Sets up the lab, and demonstrates, tests and measures cloud-hypervisor in it")]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Boots a guest whose NIC has 8 VFs, and shows what a person would want to see
    Demo {
        /// Where guests run; a probe decides when this is not given
        #[arg(long, value_enum)]
        lab: Option<Place>,
    },
    /// Checks format and lints, and runs the unit, property, fuzz, contract and integration tests
    Test {
        /// Runs only this part
        #[arg(value_enum)]
        part: Option<Part>,
        /// Runs only integration tests with this in their name
        filter: Option<String>,
        /// Where guests run; a probe decides when this is not given
        #[arg(long, value_enum)]
        lab: Option<Place>,
        /// Rewrites the checked-in expectations from what the guests show
        #[arg(long)]
        bless: bool,
        /// Shows all that the integration tests print, while they run
        #[arg(long, short)]
        verbose: bool,
    },
    /// Measures throughput and latency of a container with a VF, in virtual time, and prints a table
    Bench {
        /// What carries the frames; each in turn if it is not given
        #[arg(value_enum)]
        backend: Option<bench::Backend>,
        /// How many seconds of virtual time a test takes: each takes minutes of the machine's own
        #[arg(long, default_value_t = 0.3)]
        seconds: f64,
        /// How often each test is done
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Measures QEMU instead, as a yardstick: fetches it first
        #[arg(long)]
        qemu: bool,
    },
    /// Fills target/dist with static binaries, shell completions, man pages and unit files
    Dist,
    /// Lets the fuzz targets look for what must not be, and says how to reproduce what they find
    Fuzz {
        /// Runs only this target; each in turn if it is not given
        target: Option<String>,
        /// How many seconds each target looks
        #[arg(long, default_value_t = 60)]
        time: u64,
        /// Looks for nothing, and shows how many lines of each file the inputs reach that are there
        #[arg(long, conflicts_with_all = ["target", "time"])]
        coverage: bool,
    },
    /// Sets up the lab, and what else can be done with it
    Lab {
        #[command(subcommand)]
        what: LabTask,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Format and lints
    Lint,
    /// Unit and property tests
    Unit,
    /// Each fuzz target, for a few seconds
    Fuzz,
    /// The API against its description
    Contract,
    /// Guests under the real binary
    Integration,
}

#[derive(Subcommand)]
enum LabTask {
    /// Fetches and builds all that the lab needs, and shows its versions
    Prepare,
    /// A shell in a first-level machine, which sees the checkout
    Shell,
    /// Runs one shell command as root in a first-level machine, and ends with its exit status
    Run {
        /// The command
        command: String,
    },
    /// Checks VFs over vDPA devices that pin memory: NICs of a first-level machine, by the driver vp_vdpa
    VpVdpa {
        /// How many NICs
        #[arg(long, default_value_t = 2)]
        nics: usize,
        /// Runs this shell command there instead
        command: Option<String>,
    },
    /// Measures starts, VFs and the VMM's resident memory in virtual time
    BootTime {
        /// How often each is measured
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Measures only this many VFs: 7, 64 or 255
        #[arg(long)]
        vfs: Option<usize>,
    },
    /// Lets VFs come and go under traffic, and shows that nothing of the host's piles up
    Stress {
        /// How many VFs
        #[arg(long, default_value_t = 8)]
        vfs: u16,
        /// How often
        #[arg(long, default_value_t = 100)]
        cycles: u32,
    },
    /// Lets a PF with 8 VFs come to a guest and go, while the VFs of another one carry traffic
    Hotplug {
        /// The guest's kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.12", value_parser = ["6.1", "6.12"])]
        kernel: String,
        /// How often
        #[arg(long, default_value_t = 50)]
        rounds: u32,
    },
    /// Boots a whole Debian from a disk up to its login
    Debian {
        /// The lab's kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.12", value_parser = ["6.1", "6.12"])]
        kernel: String,
    },
}

fn main() -> ExitCode {
    let workspace = workspace();
    let outcome = match Arguments::parse().command {
        Task::Demo { lab } => demo::run(&workspace, lab),
        Task::Test { part, filter, lab, bless, verbose } => {
            let filter = filter.unwrap_or_default();
            test(&workspace, part, &IntegrationOptions { filter, lab, bless, verbose })
        }
        Task::Bench { backend, seconds, runs, qemu } => {
            let options = bench::Options { backend, seconds, runs, qemu };
            Lab::prepare(&workspace).and_then(|lab| bench::run(&lab, &workspace, &options)).map(|()| true)
        }
        Task::Dist => dist::run(&workspace).map(|()| true),
        Task::Fuzz { coverage: true, .. } => coverage::print(&workspace).map(|()| true),
        Task::Fuzz { target, time, .. } => fuzz::run(&workspace, target.as_deref(), Duration::from_secs(time)),
        Task::Lab { what } => lab_task(&workspace, &what),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cargo xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

struct IntegrationOptions {
    filter: String,
    lab: Option<Place>,
    bless: bool,
    verbose: bool,
}

/// Runs the parts asked for. The last line is the sum of all.
fn test(workspace: &Path, part: Option<Part>, options: &IntegrationOptions) -> Result<bool> {
    let started = Instant::now();
    let wanted = |this: Part| part.is_none_or(|only| only == this);
    let mut tally = Tally::default();
    if wanted(Part::Lint) {
        tally += check::lints(workspace)?;
    }
    if wanted(Part::Unit) {
        tally += check::unit_tests(workspace)?;
    }
    if wanted(Part::Fuzz) {
        tally += counted("fuzz targets", fuzz::smoke(workspace));
    }
    if wanted(Part::Contract) {
        tally += counted("contract tests", contract::run(workspace, QUESTIONS));
    }
    if wanted(Part::Integration) {
        tally += counted("integration tests", integration(workspace, options));
    }
    note("done", seconds(started.elapsed()));
    println!("{} passed, {} failed", tally.passed, tally.failed);
    Ok(tally.failed == 0)
}

/// A part that could not run is a failed test, and does not keep the others from running.
fn counted(part: &str, outcome: Result<Tally>) -> Tally {
    outcome.unwrap_or_else(|error| {
        note("FAILED", format!("{part}: {error}"));
        Tally { passed: 0, failed: 1 }
    })
}

fn integration(workspace: &Path, options: &IntegrationOptions) -> Result<Tally> {
    let lab = Lab::prepare(workspace)?;
    let binaries = build::static_binaries(workspace, true)?;
    let place = Place::decide(options.lab, &lab, &binaries.vmm)?;
    let suite = Suite {
        lab: &lab,
        workspace,
        binaries: &binaries,
        place,
        filter: &options.filter,
        bless: options.bless,
        verbose: options.verbose,
    };
    suite.run()
}

fn lab_task(workspace: &Path, what: &LabTask) -> Result<bool> {
    let lab = Lab::prepare(workspace)?;
    match what {
        LabTask::Prepare => print!("{}", lab.versions()),
        LabTask::Shell => {
            apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
            nested::shell(&lab, workspace)?;
        }
        LabTask::Run { command } => {
            let mut worker = Place::Nested.worker(&lab, workspace, 0)?;
            let status = worker.run(command, RUN_LIMIT, &mut |line| println!("{line}"));
            let status =
                status.map_err(|lost| Error::new(format!("the command did not end: {}", lost.explain(RUN_LIMIT))))?;
            return Ok(status == 0);
        }
        LabTask::VpVdpa { nics, command } => return Ok(vp_vdpa::run(&lab, workspace, *nics, command.as_deref())? == 0),
        LabTask::BootTime { runs, vfs } => boot_time::run(&lab, workspace, *runs, *vfs)?,
        LabTask::Stress { vfs, cycles } => stress::run(&lab, workspace, *vfs, *cycles)?,
        LabTask::Debian { kernel } => debian::run(&lab, workspace, kernel)?,
        LabTask::Hotplug { kernel, rounds } => hotplug::run(&lab, workspace, kernel, *rounds)?,
    }
    Ok(true)
}

/// The root of the checkout: this program is built in it.
fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
