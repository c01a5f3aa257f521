//! How fast a container's VF is, by backend, next to QEMU and next to other ways of giving a container a network.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::apt;
use crate::build::{self, Binaries};
use crate::cpio::Cpio;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel};
use crate::progress::note;
use crate::suite::quote;

mod programs;
mod qemu;

/// The kernel of the guests.
const KERNEL: &str = "6.12";
/// Where the files are that are run and read: in the first-level machine's memory. While the machine waits for the checkout's disk its
/// clock leaps, by as much as the disk is busy.
const IN_MEMORY: &str = "/run/lab";
/// What the start may take, and what each second of virtual time may take, under load.
const LIMITS: (Duration, Duration) = (Duration::from_secs(240), Duration::from_secs(200));
/// The tests, by what the measuring program calls them.
const TESTS: [&str; 4] = ["tcp-out", "tcp-in", "tcp-rr", "udp-out"];
/// How often a test is tried.
const ATTEMPTS: usize = 4;

/// What carries the frames between the container and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    /// A tap, by the VMM
    Tap,
    /// A tap, by the host's kernel
    VhostNet,
    /// The lab's vhost-user backend
    VhostUser,
    /// The lab's VDUSE device
    Vdpa,
    /// A tap, and containers with other networks besides
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

/// What is asked for.
pub struct Options {
    /// The backend; each in turn if there is none.
    pub backend: Option<Backend>,
    /// How many seconds of virtual time a test takes.
    pub seconds: f64,
    /// How often each test is done.
    pub runs: usize,
    /// Whether QEMU is measured, and not cloud-hypervisor.
    pub qemu: bool,
}

impl Options {
    fn backends(&self) -> Result<Vec<Backend>> {
        // QEMU speaks vhost-user and vDPA as well, but is a yardstick only for what carries frames of taps.
        let of_qemu = |backend: &Backend| !matches!(backend, Backend::VhostUser | Backend::Vdpa);
        match self.backend {
            Some(backend) if self.qemu && !of_qemu(&backend) => {
                Err(Error::new(format!("--qemu measures taps, with and without vhost-net, and not {}", backend.name())))
            }
            Some(backend) => Ok(vec![backend]),
            None => Ok(Backend::ALL.into_iter().filter(|backend| !self.qemu || of_qemu(backend)).collect()),
        }
    }
}

/// Measures in virtual time, where one instruction is one nanosecond, and prints a table.
pub fn run(lab: &Lab, workspace: &Path, options: &Options) -> Result<()> {
    apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
    let binaries = build::static_binaries(workspace, false)?;
    let extra = guest_files(lab, &binaries)?;
    let qemu = if options.qemu { Some(qemu::fetch(lab)?) } else { None };
    println!("| backend | figure | median | least to most | processor, %: guest / kernel / programs |");
    println!("|---|---|---|---|---|");
    for backend in options.backends()? {
        let command = prepare(lab, &binaries, &extra, qemu.as_deref());
        measure(lab, workspace, &command, backend.name(), options)?;
    }
    Ok(())
}

/// Does each test of one kind in a first-level machine of its own. One that does not end, as with an emulator whose fault could not be
/// taken out, is tried again, and never silently.
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

/// What the guest has besides its usual files, as an archive to follow on that of those.
fn guest_files(lab: &Lab, binaries: &Binaries) -> Result<PathBuf> {
    let mut archive = Cpio::new();
    for folder in ["containers", "lib", "lib64", "usr", "usr/sbin"] {
        archive.directory(folder);
    }
    let mut add = |target: &str, path: &Path| -> Result<()> {
        archive.file(target, 0o755, &fs::read(path).context(path.display())?);
        Ok(())
    };
    add("bin/netbench", &binaries.netbench)?;
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
        archive.file(&format!("containers/{name}"), 0o644, &image);
    }
    let path = lab.image("bench.cpio");
    fs::write(&path, archive.finish()).context(path.display())?;
    Ok(path)
}

/// The shell commands that bring all that the measurement reads and runs into memory.
fn prepare(lab: &Lab, binaries: &Binaries, extra: &Path, qemu: Option<&Path>) -> String {
    let mut commands = format!(
        "ulimit -n 8192 && ulimit -l unlimited && export CH_LAB={IN_MEMORY} CH_BINARY={IN_MEMORY}/vmm \
         CH_FIXTURES={IN_MEMORY} && mkdir -p {IN_MEMORY}/kernels/{KERNEL} {IN_MEMORY}/images"
    );
    let mut copy = |from: &Path, to: &str| commands += &format!(" && cp -r {} {IN_MEMORY}/{to}", quote(from));
    for image in ["vmlinux", "bzImage"] {
        copy(&lab.kernel(KERNEL, image), &format!("kernels/{KERNEL}/"));
    }
    for program in [&binaries.bench, &binaries.netbench] {
        copy(program, "");
    }
    copy(&lab.kernel("first-level", "containers"), "");
    for fixture in ["vhost-user-net", "vduse-net", "vdpa-dev"] {
        copy(&binaries.fixtures.join(fixture), "");
    }
    match qemu {
        Some(folder) => {
            copy(folder, "qemu");
            copy(&folder.join("as-cloud-hypervisor"), "vmm");
        }
        None => copy(&binaries.vmm, "vmm"),
    }
    let (guest, extra) = (lab.image(&format!("guest-{KERNEL}.cpio")), quote(extra));
    commands + &format!(" && cat {} {extra} > {IN_MEMORY}/images/guest-{KERNEL}.cpio", quote(&guest))
}
