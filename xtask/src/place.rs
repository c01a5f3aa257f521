//! Where guests run: on the machine's own KVM when that can run a stock kernel, in the nested lab when it cannot.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::apt;
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::nested::{Clock, FirstLevel, Lost};
use crate::progress::{Step, note};

/// How long the machine's own KVM may take to bring a stock kernel to its init. Real hardware needs half a second.
const PROBE_LIMIT: Duration = Duration::from_secs(8);
/// What the init of every guest of the lab prints first.
const READY_MARK: &str = "@@ready";

/// Where guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Place {
    /// This machine.
    Host,
    /// A first-level machine under emulation.
    Nested,
}

impl Place {
    /// The place asked for, or else the one that a probe finds, for what makes taps.
    pub fn decide(asked: Option<Place>, lab: &Lab, vmm: &Path) -> Result<Place> {
        if asked.is_none() && !is_root() {
            note("probe", "making taps on this machine needs root: guests run in the nested lab");
            return Ok(Place::Nested);
        }
        Place::decide_without_taps(asked, lab, vmm)
    }

    /// As [`Place::decide`], for what needs no more than the use of `/dev/kvm`. The probe's answer holds until the machine restarts.
    pub fn decide_without_taps(asked: Option<Place>, lab: &Lab, vmm: &Path) -> Result<Place> {
        if let Some(place) = asked {
            return Ok(place);
        }
        let record = lab.folder().join("probe");
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        if let Ok(known) = fs::read_to_string(&record)
            && let Some(answer) = known.strip_prefix(boot.as_str())
        {
            return Ok(if answer == "host" { Place::Host } else { Place::Nested });
        }
        let step = Step::begin("probe", "can this machine's own KVM run a stock kernel?");
        let (place, answer) = match probe(lab, vmm) {
            Ok(()) => (Place::Host, "this machine's own KVM runs a stock kernel: guests run on it".to_owned()),
            Err(why) => (Place::Nested, format!("{why}: guests run in the nested lab")),
        };
        step.done_with(answer);
        fs::write(&record, boot + if place == Place::Host { "host" } else { "nested" }).context(record.display())?;
        Ok(place)
    }

    /// A worker here. `number` tells apart those that work at the same time.
    pub fn worker(self, lab: &Lab, workspace: &Path, number: usize) -> Result<Worker> {
        match self {
            Place::Host => Ok(Worker::Host),
            Place::Nested => {
                apt::install_missing(&[("qemu-system-x86_64", "qemu-system-x86")])?;
                let machine = FirstLevel::boot(lab, workspace, number, Clock::Real).or_else(|error| {
                    // An emulated boot can hang. It is tried again once, and never silently.
                    note("retry", format!("{error}; booting it again"));
                    FirstLevel::boot(lab, workspace, number, Clock::Real)
                })?;
                Ok(Worker::Nested(machine))
            }
        }
    }

    /// How many workers this place has room for.
    pub fn workers(self) -> usize {
        match self {
            // The tests own this machine's taps one at a time.
            Place::Host => 1,
            Place::Nested => thread::available_parallelism().map_or(1, usize::from).min(4),
        }
    }
}

/// Whether this program runs as root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no precondition and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Something that runs shell commands next to a KVM that works, as root or on this machine as who runs this.
pub enum Worker {
    /// This machine.
    Host,
    /// A first-level machine.
    Nested(FirstLevel),
}

impl Worker {
    /// Runs a command to its end or to `limit`, and hands each line that it prints to `on_line`.
    pub fn run(
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

    /// What the kernel that the commands run on says of itself, when it is broken. The machine's own is taken to be whole.
    pub fn complaint(&mut self) -> Option<String> {
        let Worker::Nested(machine) = self else { return None };
        let mut lines = Vec::new();
        let search = "dmesg | grep -E 'Oops|BUG:|soft lockup|general protection' | head -n 3";
        let found = machine.run(search, Duration::from_secs(20), &mut |line| lines.push(line.to_owned()));
        if found.is_err() {
            Some("it answers no more".into())
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

/// A process that ends with this. A test's VMMs end with the test in turn.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots the oldest stock kernel of the lab on this machine. The error says why that is not possible.
fn probe(lab: &Lab, vmm: &Path) -> Result<()> {
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    kvm.map_err(|error| Error::new(format!("/dev/kvm: {error}")))?;
    let mut command = Command::new(vmm);
    command.arg("--kernel").arg(lab.kernel("6.1", "vmlinux")).arg("--initramfs").arg(lab.image("guest-6.1.cpio"));
    command.args(["--cmdline", "console=ttyS0 quiet", "--cpus", "boot=1", "--memory", "size=256M"]);
    command.args(["--serial", "tty"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
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
                    "its KVM does not bring a stock kernel up in {} s",
                    PROBE_LIMIT.as_secs()
                )));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(Error::new("a guest on its KVM ended early")),
        }
    }
    Ok(())
}
