//! The developer's commands: `cargo xtask demo`, `cargo xtask test`, `cargo xtask fuzz`, `cargo xtask lab` and others.
//!
//! They fetch kernels and tools as packages, build programs, and run them on this machine's own KVM or, if it cannot
//! run a stock kernel, in an emulated machine. This crate does not depend on the VMM's.

mod build;
mod checks;
mod dist;
mod error;
mod fetch;
mod guest_tools;
mod lab;
mod licenses;
mod machine;
mod progress;
mod runs;
mod stages;
mod test_run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use checks::{check, coverage, fuzz, miri};
use error::{Error, Result};
use fetch::apt;
use lab::Lab;
use machine::lab_kind::LabKind;
use machine::nested;
use runs::{bench, boot_time, cloud_image, debian, demo, hotplug, stress, vp_vdpa};
use test_run::{Options, Part};

/// Time that a command of `cargo xtask lab run` may take.
const RUN_LIMIT: Duration = Duration::from_secs(3600);

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Demonstrates, tests and measures cloud-hypervisor. Fetches and builds what that needs"
)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Boots a guest with an SR-IOV NIC, enables its 8 VFs and pings the host through each
    Demo {
        /// Part to show instead: VFs of two tenants on a switch, which reach their own and no other
        #[arg(value_enum)]
        part: Option<demo::Part>,
        /// Machine on which guests run [default: host if this machine's KVM boots a stock kernel within 8 s]
        #[arg(long, value_enum)]
        lab: Option<LabKind>,
    },
    /// Runs all checks and tests: lint, unit, contract, integration, fuzz
    Test {
        /// Runs only this part
        #[arg(value_enum)]
        part: Option<Part>,
        /// Runs only the integration tests whose name (file::test) contains this
        filter: Option<String>,
        /// Machine on which guests run [default: host if this machine's KVM boots a stock kernel within 8 s]
        #[arg(long, value_enum)]
        lab: Option<LabKind>,
        /// Also runs the longer tests: a cloud image, and tests that the second kernel most likely repeats
        #[arg(long)]
        all: bool,
        /// Rewrites the expected output under tests/integration/expected from what the guests print
        #[arg(long)]
        bless: bool,
        /// Shows the output of the integration tests while they run
        #[arg(long, short)]
        verbose: bool,
    },
    /// Measures throughput and latency of a container's VF in virtual time, and prints a table
    Bench {
        /// The VF's backend [default: each in turn]
        #[arg(value_enum)]
        backend: Option<bench::Backend>,
        /// Seconds of virtual time per test; each second takes minutes of real time
        #[arg(long, default_value_t = 0.3)]
        seconds: f64,
        /// Number of runs of each test
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Runs only this test of the backend, such as bulk-in of tap, or eight of migration
        #[arg(long, requires = "backend")]
        only: Option<String>,
        /// Measures QEMU instead, for comparison, and fetches it first
        #[arg(long)]
        qemu: bool,
        /// Measures this static binary in the checkout, instead of building one
        #[arg(long, conflicts_with = "qemu")]
        vmm: Option<PathBuf>,
    },
    /// Fills target/dist with static binaries, shell completions, man pages, documents, unit files and licences
    Dist,
    /// Fills target/guest with static programs for guests: vfctl, and the CNI plugin virtio-sriov-cni
    GuestTools,
    /// Rewrites the generated parts of checked-in files: the schemas of api/openapi.yaml, and tables of options in docs
    Generate,
    /// Runs the fuzz targets, and prints how to reproduce their findings
    Fuzz {
        /// The target [default: all of them]
        target: Option<String>,
        /// Seconds per target
        #[arg(long, default_value_t = 60)]
        time: u64,
        /// Rewrites docs/coverage.md with the lines that the existing corpora reach, instead of fuzzing
        #[arg(long, conflicts_with_all = ["target", "time"])]
        coverage: bool,
    },
    /// Runs the tests of pci, and those of virtio-devices that it supports, in Miri, which finds undefined behaviour
    Miri,
    /// Sets up the lab, opens a shell in it, and runs long tests and measurements there
    Lab {
        #[command(subcommand)]
        what: LabTask,
    },
}

#[derive(Subcommand)]
enum LabTask {
    /// Fetches everything that the lab can use, and prints the versions
    Prepare,
    /// Opens a shell in a first-level machine, which has the checkout mounted
    Shell,
    /// Runs a shell command as root in a first-level machine; fails if that fails
    Run {
        /// The command
        command: String,
    },
    /// Tests VFs over vDPA devices that pin memory, which the driver vp_vdpa creates from emulated NICs
    VpVdpa {
        /// Number of NICs
        #[arg(long, default_value_t = 2)]
        nics: usize,
        /// Runs this shell command there instead
        command: Option<String>,
    },
    /// Measures boots, VFs and the VMM's resident memory in virtual time
    BootTime {
        /// Number of measurements of each figure
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Measures only this many VFs: 7, 64 or 255; with 0, only starts
        #[arg(long)]
        vfs: Option<usize>,
        /// A static binary of the VMM in the checkout, of another commit
        #[arg(long)]
        vmm: Option<PathBuf>,
    },
    /// Enables and disables VFs under traffic, and checks that the host leaks nothing
    Stress {
        /// Number of VFs
        #[arg(long, default_value_t = 8)]
        vfs: u16,
        /// Number of cycles
        #[arg(long, default_value_t = 100)]
        cycles: u32,
    },
    /// Plugs a PF with 8 VFs into a guest and unplugs it, while another PF's VFs carry traffic
    Hotplug {
        /// The guest's kernel
        #[arg(long, default_value = "6.12", value_parser = ["6.1", "6.12"])]
        kernel: String,
        /// Number of rounds
        #[arg(long, default_value_t = 50)]
        rounds: u32,
    },
    /// Boots a Debian with systemd from a disk through firmware, with cloud-init's disk, enables VFs with a unit and
    /// pings it through them
    CloudImage {
        /// The form of the disk
        #[arg(value_enum, default_value_t = cloud_image::Form::Raw)]
        form: cloud_image::Form,
        /// Firmware that boots it
        #[arg(long, value_enum, default_value_t = cloud_image::Firmware::Edk2)]
        firmware: cloud_image::Firmware,
    },
    /// Boots a whole Debian from a disk to its login prompt
    Debian {
        /// The guest's kernel
        #[arg(long, default_value = "6.12", value_parser = ["6.1", "6.12"])]
        kernel: String,
    },
}

fn main() -> ExitCode {
    let workspace = workspace();
    let outcome = match Arguments::parse().command {
        Task::Demo { part, lab } => demo::run(&workspace, part.unwrap_or_default(), lab),
        Task::Test { part, filter, lab, all, bless, verbose } => {
            let filter = filter.unwrap_or_default();
            test_run::run(&workspace, part, &Options { filter, lab, all, bless, verbose })
        }
        Task::Bench { backend, seconds, runs, only, qemu, vmm } => {
            let options = bench::Options { backend, seconds, runs, only, qemu, vmm };
            Lab::open(&workspace).and_then(|lab| bench::run(&lab, &workspace, &options)).map(|()| true)
        }
        Task::Dist => dist::run(&workspace).map(|()| true),
        Task::GuestTools => guest_tools::run(&workspace).map(|()| true),
        Task::Generate => check::generate(&workspace),
        Task::Fuzz { coverage: true, .. } => coverage::write(&workspace).map(|()| true),
        Task::Fuzz { target, time, .. } => fuzz::run(&workspace, target.as_deref(), Duration::from_secs(time)),
        Task::Miri => miri::run(&workspace),
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

fn lab_task(workspace: &Path, what: &LabTask) -> Result<bool> {
    let lab = Lab::open(workspace)?;
    match what {
        LabTask::Prepare => {
            lab.prepare_everything()?;
            print!("{}", lab.versions());
        }
        LabTask::Shell => {
            lab.prepare_everything()?;
            apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
            nested::shell(&lab, workspace)?;
        }
        LabTask::Run { command } => {
            lab.prepare_everything()?;
            let mut worker = LabKind::Nested.worker(&lab, workspace, 0)?;
            let status = worker.run(command, RUN_LIMIT, &mut |line| println!("{line}"));
            let status =
                status.map_err(|lost| Error::new(format!("the command did not end: {}", lost.explain(RUN_LIMIT))))?;
            return Ok(status == 0);
        }
        LabTask::VpVdpa { nics, command } => return Ok(vp_vdpa::run(&lab, workspace, *nics, command.as_deref())? == 0),
        LabTask::BootTime { runs, vfs, vmm } => boot_time::run(&lab, workspace, *runs, *vfs, vmm.as_deref())?,
        LabTask::Stress { vfs, cycles } => stress::run(&lab, workspace, *vfs, *cycles)?,
        LabTask::CloudImage { form, firmware } => return cloud_image::run(&lab, workspace, *form, *firmware),
        LabTask::Debian { kernel } => debian::run(&lab, workspace, kernel)?,
        LabTask::Hotplug { kernel, rounds } => hotplug::run(&lab, workspace, kernel, *rounds)?,
    }
    Ok(true)
}

/// The root of the checkout that this program was built in.
fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
