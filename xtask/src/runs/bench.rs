//! Throughput and latency between a guest and its host: of a container's VF, per backend, compared with other container
//! networks; of vsock; and of virtio-fs. Also between two containers of a guest, by the connection of their VFs. QEMU
//! is measured for comparison. Also the time to save and restore a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::build;
use crate::checks::suite::{quote, vmm_arguments};
use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::lab::cpio::Cpio;
use crate::lab::images::Image;
use crate::lab::programs;
use crate::lab::{FIRST_LEVEL_KERNEL, GENERIC_KERNEL, Lab};
use crate::machine::nested::{Clock, FirstLevel, Machine};
use crate::progress::note;

mod qemu;
mod snapshot;

/// The kernel of the guests.
const KERNEL: &str = "6.12";
/// Folder of the programs and their files: in the first-level machine's memory. While the machine waits for the
/// checkout's disk, its clock jumps ahead by the wait.
const IN_MEMORY: &str = "/run/lab";
/// Time limits under load: for the start, and for each second of virtual time.
const LIMITS: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(200));
/// Number of attempts of a test before it fails.
const ATTEMPTS: usize = 4;

/// Subject of a measurement: for a network, the backend that carries frames between the container and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// A tap, served by the VMM
    Tap,
    /// A tap, served by the VMM, with a spoof check and a VLAN
    TapPolicy,
    /// A tap, served by the host's kernel
    VhostNet,
    /// The lab's vhost-user backend
    VhostUser,
    /// The lab's VDUSE device
    Vdpa,
    /// A tap, and other networks of containers for comparison
    Containers,
    /// Two VFs on the switch of their PF; with --qemu, on an igb
    Switch,
    /// Two VFs on the switch of an emulated X550; with --qemu, on an igb
    X550,
    /// As x550, with an MTU of 9000
    X550Jumbo,
    /// The 63 VFs of an emulated X550, which are enabled and disabled
    X550Vfs,
    /// Two VFs over taps in a bridge of the host, served by the VMM
    Bridge,
    /// Two VFs over taps in a bridge of the host, served by the host's kernel
    BridgeVhost,
    /// A tap, served by the VMM, without an IOMMU and behind the guest's in passthrough, lazy and strict mode
    Iommu,
    /// As iommu, with a tap that is served by the host's kernel
    IommuVhost,
    /// As iommu, with QEMU's intel-iommu: for --qemu
    IommuIntel,
    /// Connections to a program of the host over vsock
    Vsock,
    /// A folder of the host, served by virtiofsd
    VirtioFs,
    /// A guest that is saved and restored, with a NIC, 8 VFs and 255 VFs
    Snapshot,
    /// A guest that moves to another VMM and back
    Migration,
    /// A guest with a VF of the host's NIC: its start, by the machine's own clock, and its VMM's memory
    Vfio,
}

impl Backend {
    const ALL: [Backend; 4] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa];

    fn name(self) -> &'static str {
        match self {
            Backend::Tap => "tap",
            Backend::TapPolicy => "tap-policy",
            Backend::VhostNet => "vhost-net",
            Backend::VhostUser => "vhost-user",
            Backend::Vdpa => "vdpa",
            Backend::Containers => "containers",
            Backend::Switch => "switch",
            Backend::X550 => "x550",
            Backend::X550Jumbo => "x550-jumbo",
            Backend::X550Vfs => "x550-vfs",
            Backend::Bridge => "bridge",
            Backend::BridgeVhost => "bridge-vhost",
            Backend::Iommu => "iommu",
            Backend::IommuVhost => "iommu-vhost",
            Backend::IommuIntel => "iommu-intel",
            Backend::Vsock => "vsock",
            Backend::VirtioFs => "virtio-fs",
            Backend::Snapshot => "snapshot",
            Backend::Migration => "migration",
            Backend::Vfio => "vfio",
        }
    }

    /// Tests that each get a first-level machine, by their names in the measuring program, or `all`.
    fn tests(self) -> &'static [&'static str] {
        match self {
            Backend::Switch
            | Backend::X550
            | Backend::X550Jumbo
            | Backend::X550Vfs
            | Backend::Bridge
            | Backend::BridgeVhost
            | Backend::Vsock
            | Backend::VirtioFs
            | Backend::Vfio => &["all"],
            Backend::Snapshot => &["0", "small-pages", "8", "255"],
            Backend::Migration => &["one", "local", "eight", "many", "writes", "cancel", "copying"],
            _ => &["bulk-out", "bulk-in", "requests", "datagrams-out"],
        }
    }

    /// Number of measurements of a machine.
    fn measurements(self) -> f64 {
        match self {
            // One for each network, or each mode of the IOMMU.
            Backend::Containers | Backend::Iommu | Backend::IommuVhost | Backend::IommuIntel => 4.0,
            // All tests.
            Backend::Switch | Backend::X550 | Backend::X550Jumbo | Backend::Bridge | Backend::BridgeVhost => 4.0,
            Backend::Vsock | Backend::VirtioFs => 3.0,
            // All VFs come and go, whatever the seconds.
            Backend::X550Vfs => 10.0,
            _ => 1.0,
        }
    }

    /// The kernel of its guests. Debian's cloud kernel has no driver for igb, and none for an X550.
    fn kernel(self, qemu: bool) -> &'static str {
        let is_generic = self == Backend::Vfio || self.is_x550();
        if is_generic || qemu && self == Backend::Switch { GENERIC_KERNEL } else { KERNEL }
    }

    /// The first-level machine. The QEMU that has an igb cannot count instructions here.
    const fn machine(self) -> Machine {
        match self {
            Backend::Vfio => Machine::VFIO,
            _ => Machine::plain(Clock::Instructions),
        }
    }

    /// The initramfs of its guests.
    fn image(self) -> Image {
        let has_modules = self.is_x550() || matches!(self, Backend::Vsock | Backend::VirtioFs);
        if self.has_iommu() || has_modules { Image::GuestWithModules } else { Image::Guest }
    }

    fn is_x550(self) -> bool {
        matches!(self, Backend::X550 | Backend::X550Jumbo | Backend::X550Vfs)
    }

    fn has_iommu(self) -> bool {
        matches!(self, Backend::Iommu | Backend::IommuVhost | Backend::IommuIntel)
    }
}

/// Programs that the measurement runs.
struct Programs {
    vmm: PathBuf,
    bench: PathBuf,
    netbench: PathBuf,
    filebench: PathBuf,
    /// The folder of the fixtures.
    fixtures: PathBuf,
}

/// Options of a measurement.
pub(crate) struct Options {
    /// The backend, or each in turn.
    pub backend: Option<Backend>,
    /// Seconds of virtual time that a test takes.
    pub seconds: f64,
    /// Number of runs of each test.
    pub runs: usize,
    /// The only test to run, by its name.
    pub only: Option<String>,
    /// True to measure QEMU instead of cloud-hypervisor.
    pub qemu: bool,
    /// The VMM to use instead of building one: a static binary in the checkout.
    pub vmm: Option<PathBuf>,
}

impl Options {
    fn vmm(&self, workspace: &Path) -> Result<PathBuf> {
        self.vmm.as_ref().map_or_else(|| build::vmm(workspace), |path| path.canonicalize().context(path.display()))
    }

    /// The tests to run of `backend`.
    fn tests(&self, backend: Backend) -> Result<Vec<&'static str>> {
        let wants = |test: &&str| self.only.as_ref().is_none_or(|only| only == test);
        match backend.tests().iter().copied().filter(wants).collect::<Vec<_>>() {
            tests if tests.is_empty() => Err(Error::new(format!(
                "--only {}: {} has no such test, only {}",
                self.only.as_deref().unwrap_or_default(),
                backend.name(),
                backend.tests().join(", ")
            ))),
            tests => Ok(tests),
        }
    }

    fn backends(&self) -> Result<Vec<Backend>> {
        // QEMU also supports vhost-user and vDPA, but the comparison is made for taps only.
        let of_qemu = |backend: &Backend| {
            !matches!(
                backend,
                Backend::VhostUser | Backend::Vdpa | Backend::TapPolicy | Backend::Snapshot | Backend::X550Vfs
            )
        };
        match self.backend {
            Some(Backend::IommuIntel) if !self.qemu => {
                Err(Error::new("cloud-hypervisor has no intel-iommu; add --qemu, or measure iommu"))
            }
            Some(backend) if self.qemu && !of_qemu(&backend) => Err(Error::new(format!(
                "--qemu does not measure {}; leave out --qemu, or choose another",
                backend.name()
            ))),
            Some(backend) => Ok(vec![backend]),
            None => Ok(Backend::ALL.into_iter().filter(|backend| !self.qemu || of_qemu(backend)).collect()),
        }
    }
}

/// Measures in virtual time, where one instruction is one nanosecond, and prints a table.
pub(crate) fn run(lab: &Lab, workspace: &Path, options: &Options) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    if options.backends()? == [Backend::Snapshot] {
        let (vmm, tests) = (options.vmm(workspace)?, options.tests(Backend::Snapshot)?);
        return snapshot::run(lab, workspace, vmm, (&tests, options.runs), |command, limit, what| {
            run_test(lab, workspace, Backend::Snapshot.machine(), command, limit, what)
        });
    }
    let programs = Programs {
        vmm: options.vmm(workspace)?,
        bench: build::program(workspace, "bench")?,
        netbench: build::measuring_program(workspace, "netbench")?,
        filebench: build::measuring_program(workspace, "filebench")?,
        fixtures: build::fixtures(workspace)?,
    };
    // The first-level machine has iproute2 for the networks of containers.
    lab.peers()?;
    let extra = guest_files(lab, &programs)?;
    let qemu = if options.qemu { Some(qemu::fetch(lab)?) } else { None };
    println!("| backend | figure | median | least to most | processor, %: guest / kernel / programs |");
    println!("|---|---|---|---|---|");
    for backend in options.backends()? {
        let command = prepare(lab, backend, &programs, &extra, qemu.as_deref())?;
        measure(lab, workspace, &command, backend, options)?;
    }
    Ok(())
}

/// Runs the tests of one backend, those of networks in a first-level machine each. A test that hangs, as it may under
/// an emulator that could not be patched, is retried with a message.
fn measure(lab: &Lab, workspace: &Path, prepare: &str, backend: Backend, options: &Options) -> Result<()> {
    // With QEMU, the kernel handles the connections.
    let what = if options.qemu && backend == Backend::Vsock { "vhost-vsock" } else { backend.name() };
    note(
        "measure",
        match backend {
            Backend::Vfio => format!("{what}, {} starts", options.runs),
            Backend::X550Vfs => format!("{what}, {} times", options.runs),
            _ => format!("{what}, {} times {} s of virtual time a test", options.runs, options.seconds),
        },
    );
    let limit = LIMITS.0 + LIMITS.1.mul_f64(options.seconds * options.runs as f64 * backend.measurements());
    for test in options.tests(backend)? {
        let command = format!("{prepare} && exec {IN_MEMORY}/bench {what} {} {} {test}", options.seconds, options.runs);
        run_test(lab, workspace, backend.machine(), &command, limit, &format!("{test} over {what}"))?;
    }
    Ok(())
}

/// Runs a test, `what`, in its own first-level machine, and prints its lines.
fn run_test(lab: &Lab, workspace: &Path, machine: Machine, command: &str, limit: Duration, what: &str) -> Result<()> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut machine = FirstLevel::boot_as(lab, workspace, 10, &machine)?;
        match machine.run(command, limit, &mut |line| println!("{line}")) {
            Ok(0) => return Ok(()),
            Ok(status) => return Err(Error::new(format!("{what} ended with status {status}"))),
            Err(lost) if attempts < ATTEMPTS => note("retry", format!("{what}: {}", lost.explain(limit))),
            Err(lost) => return Err(Error::new(format!("{what}: {}", lost.explain(limit)))),
        }
    }
}

/// The guest's additional files, as an archive to append to its initramfs.
fn guest_files(lab: &Lab, programs: &Programs) -> Result<PathBuf> {
    let mut archive = Cpio::default();
    for folder in ["containers", "lib", "lib64", "usr", "usr/sbin"] {
        archive.directory(folder)?;
    }
    let mut add = |target: &str, path: &Path| -> Result<()> {
        archive.file(target, 0o755, &fs::read(path).context(path.display())?)
    };
    add("bin/netbench", &programs.netbench)?;
    add("bin/filebench", &programs.filebench)?;
    let programs = programs::of_containers(lab)?;
    for (folder, target) in [(programs.clone(), "usr/sbin"), (programs.join("lib"), "lib")] {
        for entry in fs::read_dir(&folder).context(folder.display())?.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_file()) {
                add(&format!("{target}/{}", entry.file_name().to_string_lossy()), &entry.path())?;
            }
        }
    }
    add("lib64/ld-linux-x86-64.so.2", &programs.join("lib/ld-linux-x86-64.so.2"))?;
    for (name, image) in lab.container_modules(KERNEL)? {
        archive.file(&format!("containers/{name}"), 0o644, &image)?;
    }
    let path = lab.folder().join("images/bench.cpio");
    fs::write(&path, archive.finish()?).context(path.display())?;
    Ok(path)
}

/// The shell commands that copy everything the measurement reads and runs into memory.
fn prepare(lab: &Lab, backend: Backend, programs: &Programs, extra: &Path, qemu: Option<&Path>) -> Result<String> {
    let mut commands = format!(
        "ulimit -n 8192 && ulimit -l unlimited && export CH_LAB={IN_MEMORY} CH_BINARY={IN_MEMORY}/vmm \
         CH_FIXTURES={IN_MEMORY} {} && \
         mkdir -p {IN_MEMORY}/kernels/{KERNEL} {IN_MEMORY}/kernels/first-level/extra {IN_MEMORY}/images",
        vmm_arguments()
    );
    let mut copy = |from: &Path, to: &str| commands += &format!(" && cp -r {} {IN_MEMORY}/{to}", quote(from));
    let kernel = backend.kernel(qemu.is_some());
    for image in ["vmlinux", "bzImage"] {
        copy(&lab.kernel(kernel, image)?, &format!("kernels/{KERNEL}/"));
    }
    for program in [&programs.bench, &programs.netbench] {
        copy(program, "");
    }
    copy(&lab.kernel(FIRST_LEVEL_KERNEL, "containers")?, "");
    copy(&lab.kernel(FIRST_LEVEL_KERNEL, "extra/vhost_vsock")?, "");
    if backend == Backend::Vfio {
        for module in ["vfio-pci", "vfio_iommu_type1", "igb"] {
            copy(&lab.kernel(FIRST_LEVEL_KERNEL, &format!("extra/{module}"))?, "kernels/first-level/extra/");
        }
    }
    for fixture in ["vhost-user-net", "vduse-net", "vdpa-dev"] {
        copy(&programs.fixtures.join(fixture), "");
    }
    match qemu {
        Some(folder) => {
            copy(folder, "qemu");
            copy(&folder.join("as-cloud-hypervisor"), "vmm");
            commands = format!("export CH_QEMU=1 && {commands}");
        }
        None => copy(&programs.vmm, "vmm"),
    }
    let image = backend.image();
    let (guest, name, extra) = (lab.image(image, kernel)?, image.file_name(KERNEL), quote(extra));
    Ok(commands + &format!(" && cat {} {extra} > {IN_MEMORY}/images/{name}", quote(&guest)))
}
