//! Throughput and latency of a container's VF, per backend, compared with QEMU and with other container networks.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::apt;
use crate::build;
use crate::cpio::Cpio;
use crate::error::{Context, Error, Result};
use crate::images::Image;
use crate::lab::{FIRST_LEVEL_KERNEL, Lab};
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::quote;

mod programs;
mod qemu;

/// The kernel of the guests.
const KERNEL: &str = "6.12";
/// Where the programs and their files are: in the first-level machine's memory. While the machine waits for the
/// checkout's disk, its clock jumps ahead by the wait.
const IN_MEMORY: &str = "/run/lab";
/// Time limits under load: for the start, and for each second of virtual time.
const LIMITS: (Duration, Duration) = (Duration::from_secs(240), Duration::from_secs(200));
/// The tests, by the names that the measuring program has for them.
const TESTS: [&str; 4] = ["tcp-out", "tcp-in", "tcp-rr", "udp-out"];
/// How often a test is tried before it fails.
const ATTEMPTS: usize = 4;

/// What carries the frames between the container and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// A tap, served by the VMM
    Tap,
    /// A tap, served by the host's kernel
    VhostNet,
    /// The lab's vhost-user backend
    VhostUser,
    /// The lab's VDUSE device
    Vdpa,
    /// A tap, and other networks of containers for comparison
    Containers,
}

impl Backend {
    const ALL: [Backend; 4] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa];

    fn name(self) -> &'static str {
        match self {
            Backend::Tap => "tap",
            Backend::VhostNet => "vhost-net",
            Backend::VhostUser => "vhost-user",
            Backend::Vdpa => "vdpa",
            Backend::Containers => "containers",
        }
    }
}

/// What the measurement runs.
struct Programs {
    vmm: PathBuf,
    bench: PathBuf,
    netbench: PathBuf,
    /// The folder of the fixtures.
    fixtures: PathBuf,
}

/// What is asked for.
pub(crate) struct Options {
    /// The backend, or each in turn.
    pub backend: Option<Backend>,
    /// How many seconds of virtual time a test takes.
    pub seconds: f64,
    /// How often each test is run.
    pub runs: usize,
    /// Whether to measure QEMU instead of cloud-hypervisor.
    pub qemu: bool,
}

impl Options {
    fn backends(&self) -> Result<Vec<Backend>> {
        // QEMU supports vhost-user and vDPA, too, but the comparison is made for taps only.
        let of_qemu = |backend: &Backend| !matches!(backend, Backend::VhostUser | Backend::Vdpa);
        match self.backend {
            Some(backend) if self.qemu && !of_qemu(&backend) => Err(Error::new(format!(
                "--qemu measures only tap and vhost-net, not {}; leave out --qemu or choose one of them",
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
    let programs = Programs {
        vmm: build::vmm(workspace)?,
        bench: build::program(workspace, "bench")?,
        netbench: build::netbench(workspace)?,
        fixtures: build::fixtures(workspace)?,
    };
    // The first-level machine has iproute2 for the networks of containers.
    lab.peers()?;
    let extra = guest_files(lab, &programs.netbench)?;
    let qemu = if options.qemu { Some(qemu::fetch(lab)?) } else { None };
    println!("| backend | figure | median | least to most | processor, %: guest / kernel / programs |");
    println!("|---|---|---|---|---|");
    for backend in options.backends()? {
        let command = prepare(lab, &programs, &extra, qemu.as_deref())?;
        measure(lab, workspace, &command, backend.name(), options)?;
    }
    Ok(())
}

/// Runs each test of one backend in a first-level machine of its own. A test that hangs, as it may under an emulator
/// that could not be patched, is tried again, never silently.
fn measure(lab: &Lab, workspace: &Path, prepare: &str, what: &str, options: &Options) -> Result<()> {
    note("measure", format!("{what}, {} times {} s of virtual time a test", options.runs, options.seconds));
    let limit = LIMITS.0 + LIMITS.1.mul_f64(options.seconds * options.runs as f64 * networks(what));
    for test in TESTS {
        let command = format!("{prepare} && exec {IN_MEMORY}/bench {what} {} {} {test}", options.seconds, options.runs);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut machine = FirstLevel::boot(lab, workspace, 10, Clock::Instructions)?;
            match machine.run(&command, limit, &mut |line| println!("{line}")) {
                Ok(0) => break,
                Ok(status) => return Err(Error::new(format!("{test} over {what} ended with status {status}"))),
                Err(lost) if attempts < ATTEMPTS => {
                    note("retry", format!("{test} over {what}: {}", lost.explain(limit)));
                }
                Err(lost) => return Err(Error::new(format!("{test} over {what}: {}", lost.explain(limit)))),
            }
        }
    }
    Ok(())
}

/// How many networks are measured under one name.
fn networks(what: &str) -> f64 {
    if what == Backend::Containers.name() { 4.0 } else { 1.0 }
}

/// The guest's additional files, as an archive to append to its initramfs.
fn guest_files(lab: &Lab, netbench: &Path) -> Result<PathBuf> {
    let mut archive = Cpio::default();
    for folder in ["containers", "lib", "lib64", "usr", "usr/sbin"] {
        archive.directory(folder)?;
    }
    let mut add = |target: &str, path: &Path| -> Result<()> {
        archive.file(target, 0o755, &fs::read(path).context(path.display())?)
    };
    add("bin/netbench", netbench)?;
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
fn prepare(lab: &Lab, programs: &Programs, extra: &Path, qemu: Option<&Path>) -> Result<String> {
    let mut commands = format!(
        "ulimit -n 8192 && ulimit -l unlimited && export CH_LAB={IN_MEMORY} CH_BINARY={IN_MEMORY}/vmm \
         CH_FIXTURES={IN_MEMORY} && mkdir -p {IN_MEMORY}/kernels/{KERNEL} {IN_MEMORY}/images"
    );
    let mut copy = |from: &Path, to: &str| commands += &format!(" && cp -r {} {IN_MEMORY}/{to}", quote(from));
    for image in ["vmlinux", "bzImage"] {
        copy(&lab.kernel(KERNEL, image)?, &format!("kernels/{KERNEL}/"));
    }
    for program in [&programs.bench, &programs.netbench] {
        copy(program, "");
    }
    copy(&lab.kernel(FIRST_LEVEL_KERNEL, "containers")?, "");
    for fixture in ["vhost-user-net", "vduse-net", "vdpa-dev"] {
        copy(&programs.fixtures.join(fixture), "");
    }
    match qemu {
        Some(folder) => {
            copy(folder, "qemu");
            copy(&folder.join("as-cloud-hypervisor"), "vmm");
        }
        None => copy(&programs.vmm, "vmm"),
    }
    let (guest, extra) = (lab.image(Image::Guest, KERNEL)?, quote(extra));
    Ok(commands + &format!(" && cat {} {extra} > {IN_MEMORY}/images/guest-{KERNEL}.cpio", quote(&guest)))
}
