//! Machine on which guests run: this one, if its KVM can run a stock kernel, or else the nested lab.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::lab::Lab;
use crate::lab::images::Image;
use crate::machine::nested::{Clock, FirstLevel, Lost, Machine};
use crate::progress::{Step, note};

/// Time that this machine's KVM may take to boot a stock kernel to its init. Real hardware takes half a second.
const PROBE_LIMIT: Duration = Duration::from_secs(8);
/// The kernel that the probe boots. Every command that runs guests needs it anyway.
const PROBE_KERNEL: &str = "6.12";
/// The first line that the init of every guest prints.
const READY_MARK: &str = "@@ready";

/// Machine on which guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LabKind {
    /// On this machine's own KVM
    Host,
    /// In a machine that QEMU emulates, whose KVM always works but is slower
    Nested,
}

impl LabKind {
    /// The requested kind, or else the one that a probe chooses. For commands that create taps, which needs root.
    pub(crate) fn decide(asked: Option<LabKind>, lab: &Lab, vmm: &Path) -> Result<LabKind> {
        if asked.is_none() && !is_root() {
            note("probe", "without root no taps can be made on this machine: guests run in the nested lab");
            return Ok(LabKind::Nested);
        }
        LabKind::decide_without_taps(asked, lab, vmm)
    }

    /// As [`LabKind::decide`], for commands that need only `/dev/kvm`.
    pub(crate) fn decide_without_taps(asked: Option<LabKind>, lab: &Lab, vmm: &Path) -> Result<LabKind> {
        if let Some(place) = asked {
            return Ok(place);
        }
        if let Some(place) = LabKind::known(lab) {
            note("probe", place.reason());
            return Ok(place);
        }
        let step = Step::begin("probe", "boots a stock kernel on this machine's own KVM");
        let probed = probe(lab, vmm);
        let place = if probed.is_ok() { LabKind::Host } else { LabKind::Nested };
        step.done_with(match probed {
            Ok(()) => place.reason().to_owned(),
            Err(why) => format!("{why}; {}", place.reason()),
        });
        fs::write(record(lab), boot_id() + place.word()).context(record(lab).display())?;
        Ok(place)
    }

    /// The probe's result since the machine's start, if it ran.
    pub(crate) fn known(lab: &Lab) -> Option<LabKind> {
        let known = fs::read_to_string(record(lab)).ok()?;
        let answer = known.strip_prefix(boot_id().as_str())?;
        Some(if answer == LabKind::Host.word() { LabKind::Host } else { LabKind::Nested })
    }

    fn word(self) -> &'static str {
        match self {
            LabKind::Host => "host",
            LabKind::Nested => "nested",
        }
    }

    /// Consequence of the probe's result, and the way to override it.
    fn reason(self) -> &'static str {
        match self {
            LabKind::Host => "guests run on this machine's own KVM (--lab nested emulates one instead)",
            LabKind::Nested => {
                "guests run in an emulated machine, which is slower (--lab host uses this machine's own KVM anyway)"
            }
        }
    }

    /// A worker in this lab. `number` distinguishes concurrent workers.
    pub(crate) fn worker(self, lab: &Lab, workspace: &Path, number: usize) -> Result<Worker> {
        self.worker_in(lab, workspace, number, &Machine::plain(Clock::Real))
    }

    /// As [`LabKind::worker`], in such a machine if the lab is emulated.
    pub(crate) fn worker_in(self, lab: &Lab, workspace: &Path, number: usize, machine: &Machine) -> Result<Worker> {
        match self {
            LabKind::Host => Ok(Worker::Host),
            LabKind::Nested => {
                apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
                let booted = FirstLevel::boot_as(lab, workspace, number, machine).or_else(|error| {
                    // An emulated boot can hang. It is retried once, with a message.
                    note("retry", format!("{error}; booting it again"));
                    FirstLevel::boot_as(lab, workspace, number, machine)
                })?;
                Ok(Worker::Nested(booted))
            }
        }
    }

    /// Number of workers that fit into this lab.
    pub(crate) fn workers(self) -> usize {
        match self {
            // Tests use the same tap names.
            LabKind::Host => 1,
            LabKind::Nested => thread::available_parallelism().map_or(1, usize::from).min(4),
        }
    }
}

/// The file that keeps the probe's result until the machine restarts.
fn record(lab: &Lab) -> PathBuf {
    lab.folder().join("probe")
}

/// An identifier that changes with every start of the machine.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// True if this program runs as root.
pub(crate) fn is_root() -> bool {
    // SAFETY: geteuid has no precondition and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Runs shell commands on a machine with a working KVM: in a first-level machine as root, on this machine as the user
/// of `cargo xtask`.
pub(crate) enum Worker {
    /// This machine.
    Host,
    /// A first-level machine.
    Nested(FirstLevel),
}

impl Worker {
    /// Runs a command until it ends or `limit` has passed, and passes each line that it prints to `on_line`.
    pub(crate) fn run(
        &mut self,
        command: &str,
        limit: Duration,
        on_line: &mut dyn FnMut(&str),
    ) -> std::result::Result<i32, Lost> {
        match self {
            Worker::Host => run_here(command, limit, on_line),
            Worker::Nested(machine) => machine.run(command, limit, on_line),
        }
    }

    /// Fault of the kernel below the commands, according to its log. This machine's own kernel is assumed to work.
    pub(crate) fn complaint(&mut self) -> Option<String> {
        let Worker::Nested(machine) = self else { return None };
        let mut lines = Vec::new();
        let search = "dmesg | grep -E 'Oops|BUG:|soft lockup|general protection' | head -n 3";
        let found = machine.run(search, Duration::from_secs(20), &mut |line| lines.push(line.to_owned()));
        if found.is_err() {
            Some("it no longer answers".into())
        } else {
            Some(lines.join("; ")).filter(|text| !text.is_empty())
        }
    }
}

fn run_here(command: &str, limit: Duration, on_line: &mut dyn FnMut(&str)) -> std::result::Result<i32, Lost> {
    let deadline = Instant::now() + limit;
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("exec 2>&1\n{command}")).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut running = Running(shell.spawn().map_err(|_| Lost::MachineEnded)?);
    let Some(stdout) = running.0.stdout.take() else { return Err(Lost::MachineEnded) };
    let (sender, lines) = channel();
    thread::spawn(move || {
        BufReader::new(stdout).lines().map_while(|line| line.ok()).all(|line| sender.send(line).is_ok())
    });
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => on_line(&line),
            Err(RecvTimeoutError::Timeout) => return Err(Lost::TimedOut),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    running.0.wait().map(|status| status.code().unwrap_or(-1)).map_err(|_| Lost::MachineEnded)
}

/// A process that is killed on drop. A test's VMMs then end with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots a stock kernel on this machine. Fails with the reason why that does not work.
fn probe(lab: &Lab, vmm: &Path) -> Result<()> {
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    kvm.map_err(|error| Error::new(format!("/dev/kvm: {error}")))?;
    let mut command = Command::new(vmm);
    command.arg("--kernel").arg(lab.kernel(PROBE_KERNEL, "vmlinux")?);
    command.arg("--initramfs").arg(lab.image(Image::Guest, PROBE_KERNEL)?);
    command.args(["--cmdline", "console=ttyS0 quiet", "--cpus", "boot=1", "--memory", "size=256M"]);
    command
        .args(["--serial", "tty", "--console", "off"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut guest = Running(command.spawn().context("starting the VMM")?);
    let Some(mut stdout) = guest.0.stdout.take() else { return Err(Error::new("the VMM has no standard output")) };
    let (sender, chunks) = channel();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stdout.read(&mut buffer) {
            if sender.send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    let deadline = Instant::now() + PROBE_LIMIT;
    let mut seen = String::new();
    while !seen.contains(READY_MARK) {
        match chunks.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(chunk) => seen += &String::from_utf8_lossy(&chunk),
            Err(RecvTimeoutError::Timeout) => {
                return Err(Error::new(format!(
                    "this machine's own KVM does not boot a stock kernel within {} s",
                    PROBE_LIMIT.as_secs()
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::new("a guest on this machine's own KVM ended early"));
            }
        }
    }
    Ok(())
}
