//! The nested lab: a first-level Linux in QEMU's emulation, whose own KVM runs the guests. The host needs no
//! virtualisation support: QEMU emulates AMD's, including nested paging.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Context, Error, Result};
use crate::lab::images::Image;
use crate::lab::{FIRST_LEVEL_KERNEL, Lab};
use crate::machine::emulator;
use crate::machine::iommufd;
use crate::machine::newer_qemu;

/// Time that the first-level machine may take to boot to its init. It takes 3 to 6 s.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Interval at which a machine with [`Clock::Real`] is woken. QEMU 7.2 occasionally loses the first level's timer
/// interrupt, which stops all of Linux's timers: the machine hangs until another interrupt arrives, such as that of its
/// serial port.
const WAKE_INTERVAL: Duration = Duration::from_secs(5);
/// The first byte of a line from the first-level machine's init, as opposed to a command's output.
const RECORD: u8 = 0x1e;

/// Clock of the first-level machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The machine's own.
    Real,
    /// Virtual: one instruction of the emulated processor takes one nanosecond, so that figures repeat on any machine.
    Instructions,
}

/// The virtio NICs that a first-level machine has behind an IOMMU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nics {
    /// None, and no IOMMU.
    None,
    /// This many, behind AMD's IOMMU, for the driver vp_vdpa.
    Vdpa(usize),
    /// Behind Intel's IOMMU, for VFIO: two virtio NICs, an igb with VFs, and two of Realtek's 8139, which have
    /// interrupt pins only. Each is behind its own port, and so has PCI Express with function level reset, or else a
    /// reset through its port. Also a device with two functions, which share an IOMMU group, and one without
    /// interrupts.
    Vfio,
}

/// The kind of a first-level machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Kernel in the lab.
    pub kernel: &'static str,
    /// Clock of the machine.
    pub clock: Clock,
    /// NICs of the machine.
    pub nics: Nics,
}

impl Machine {
    /// The machine that guests run in.
    pub(crate) const fn plain(clock: Clock) -> Machine {
        Machine { kernel: FIRST_LEVEL_KERNEL, clock, nics: Nics::None }
    }

    /// The machine with devices to pass through.
    pub(crate) const VFIO: Machine = Machine { nics: Nics::Vfio, ..Machine::plain(Clock::Real) };

    /// The machine with devices to pass through and a kernel with iommufd.
    pub(crate) const IOMMUFD: Machine = Machine { kernel: iommufd::KERNEL, ..Machine::VFIO };
}

/// A running first-level machine that waits for commands.
pub(crate) struct FirstLevel {
    qemu: Child,
    commands: Arc<Mutex<ChildStdin>>,
    output: Receiver<Vec<u8>>,
}

/// Reason why a command returned no exit status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The command exceeded its time limit.
    TimedOut,
    /// The first-level machine ended while it ran.
    MachineEnded,
    /// The command failed, and the first-level machine's own kernel is broken, with this message.
    MachineBroken(String),
}

impl Lost {
    /// Text about a lost command, for the user. The command had the time limit `limit`.
    pub(crate) fn explain(&self, limit: Duration) -> String {
        match self {
            Lost::TimedOut => format!("it ran longer than {} s", limit.as_secs()),
            Lost::MachineEnded => "the machine it ran in ended".into(),
            Lost::MachineBroken(how) => format!("the kernel of the machine it ran in is broken: {how}"),
        }
    }
}

impl FirstLevel {
    /// Boots a machine with `workspace` mounted at the same path. `number` distinguishes concurrent machines.
    pub(crate) fn boot(lab: &Lab, workspace: &Path, number: usize, clock: Clock) -> Result<FirstLevel> {
        FirstLevel::boot_as(lab, workspace, number, &Machine::plain(clock))
    }

    /// As [`FirstLevel::boot`], for another kind of machine.
    pub(crate) fn boot_as(lab: &Lab, workspace: &Path, number: usize, machine: &Machine) -> Result<FirstLevel> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
        if !workspace.display().to_string().chars().all(plain) {
            let path = workspace.display();
            return Err(Error::new(format!(
                "{path}: the nested lab needs a checkout whose path has only letters, digits and ._-+; move it"
            )));
        }
        let folder = lab.folder().join("log");
        fs::create_dir_all(&folder).context(folder.display())?;
        let log = |kind: &str| folder.join(format!("first-level-{number}-{kind}.log"));
        let errors = fs::File::create(log("qemu")).context("making QEMU's log")?;
        let mut command = qemu(lab, workspace, machine, "")?;
        command.arg("-serial").arg(format!("file:{}", log("console").display())).args(["-serial", "stdio"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut qemu = command.spawn().context("starting qemu-system-x86_64")?;
        let (Some(commands), Some(stdout)) = (qemu.stdin.take(), qemu.stdout.take()) else {
            return Err(Error::new("QEMU has no standard input and output"));
        };
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
            // The firmware's output after the last line, if any, is not needed.
            let _ = reader.read_to_end(&mut line);
        });
        let commands = Arc::new(Mutex::new(commands));
        let mut booted = FirstLevel { qemu, commands, output };
        booted.await_record(Instant::now() + BOOT_LIMIT, &mut |_| {}).map_err(|lost| {
            let why = match lost {
                Lost::TimedOut => format!("was not up after {} s", BOOT_LIMIT.as_secs()),
                Lost::MachineEnded | Lost::MachineBroken(_) => "ended while it booted".to_owned(),
            };
            Error::new(format!("the first-level machine {why}; see {}", log("console").display()))
        })?;
        if machine.clock == Clock::Real {
            let commands = Arc::clone(&booted.commands);
            thread::spawn(move || keep_awake(&commands));
        }
        Ok(booted)
    }

    /// Runs a shell command until it ends and passes each line that it prints to `on_line`. Returns its exit status.
    pub(crate) fn run(
        &mut self,
        command: &str,
        limit: Duration,
        on_line: &mut dyn FnMut(&str),
    ) -> std::result::Result<i32, Lost> {
        let deadline = Instant::now() + limit;
        if send(&self.commands, command).is_err() {
            return Err(Lost::MachineEnded);
        }
        let record = self.await_record(deadline, on_line)?;
        Ok(record.strip_prefix("exit ").and_then(|status| status.parse().ok()).unwrap_or(-1))
    }

    fn await_record(&mut self, deadline: Instant, on_line: &mut dyn FnMut(&str)) -> std::result::Result<String, Lost> {
        // The init adds a line end to a command's output, so an empty line is held back until another one follows.
        let mut held_back = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.output.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Timeout => Lost::TimedOut,
                RecvTimeoutError::Disconnected => Lost::MachineEnded,
            })?;
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches(['\r', '\n']);
            if let Some(record) = text.strip_prefix(char::from(RECORD)) {
                return Ok(record.to_owned());
            }
            if held_back {
                on_line("");
            }
            held_back = text.is_empty();
            if !held_back {
                on_line(text);
            }
        }
    }
}

impl Drop for FirstLevel {
    fn drop(&mut self) {
        // The command's files in the checkout are on this machine already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Sends a line to the init of a first-level machine.
fn send(commands: &Mutex<ChildStdin>, line: &str) -> io::Result<()> {
    let mut commands = commands.lock();
    writeln!(commands, "{line}")?;
    commands.flush()
}

/// Wakes a first-level machine every [`WAKE_INTERVAL`] until it ends. Its init ignores empty lines.
fn keep_awake(commands: &Mutex<ChildStdin>) {
    while send(commands, "").is_ok() {
        thread::sleep(WAKE_INTERVAL);
    }
}

/// Runs a shell of the first-level machine in this terminal until it ends.
pub(crate) fn shell(lab: &Lab, workspace: &Path) -> Result<()> {
    let mut command = qemu(lab, workspace, &Machine::plain(Clock::Real), "lab.shell")?;
    let status = command.args(["-serial", "mon:stdio"]).status().context("starting qemu-system-x86_64")?;
    if status.success() { Ok(()) } else { Err(Error::new(format!("QEMU: {status}"))) }
}

/// The first level's CPU. QEMU does not let a hypervisor intercept XSETBV, so KVM would not get the set of registers
/// that its guest saves, and would report too small an area for them. Without XSAVE the problem does not arise. With
/// cmpxchg16b, QEMU 7.2 sometimes leaves garbage in the flags register: 7 of 120 boots of Linux 6.12, whose slab
/// allocator uses it, crashed; without it none of 110 did.
const CPU: &str = "EPYC,check=off,+svm,-cx16,-xsave,-avx,-avx2,-fma,-f16c";

/// Kernel parameters that leave out what protects a kernel and costs much under emulation: retpolines, and the clearing
/// of each page that is allocated. With them here and in guests, the tests named `sriov::a_` take 58 s of processor
/// time instead of 75. Measurements do without, as they have a clock that counts instructions.
pub(crate) const FAST_KERNEL: &str = "mitigations=off init_on_alloc=0";

/// Adds NICs, with the host at 10.N.0.1 of the network of NIC N. Returns additional kernel parameters.
fn add_nics(nics: Nics, command: &mut Command) -> &'static str {
    let (count, append) = match nics {
        Nics::None => return "",
        Nics::Vdpa(count) => {
            // Must come before all devices that are behind it.
            command.args(["-device", "amd-iommu"]);
            (count, "")
        }
        Nics::Vfio => {
            command.args(["-device", "intel-iommu,intremap=on,aw-bits=48"]);
            for function in ["10.0,multifunction=on", "10.1"] {
                let device = "virtio-rng-pci,disable-legacy=on,iommu_platform=on";
                command.arg("-device").arg(format!("{device},addr={function}"));
            }
            command.args(["-device", "pvpanic-pci"]);
            (5, " intel_iommu=on")
        }
    };
    for nic in 0..count {
        // Data sent to port 7 of .100 are echoed.
        let echo = format!("guestfwd=tcp:10.{nic}.0.100:7-cmd:cat");
        command.arg("-netdev").arg(format!("user,id=nic{nic},net=10.{nic}.0.0/24,host=10.{nic}.0.1,{echo}"));
        let device = "virtio-net-pci,disable-legacy=on,iommu_platform=on";
        if nics == Nics::Vfio {
            let device = match nic {
                2 => "igb",
                3.. => "rtl8139",
                _ => device,
            };
            let place = format!("netdev=nic{nic},bus=port{nic},mac=52:54:00:00:10:0{nic},romfile=");
            command.arg("-device").arg(format!("pcie-root-port,id=port{nic},chassis={}", nic + 1));
            command.arg("-device").arg(format!("{device},{place}"));
        } else {
            // Every other one has a page per doorbell, which the driver can pass on.
            let pages = if nic % 2 == 0 { "on" } else { "off" };
            command.arg("-device").arg(format!("{device},page-per-vq={pages},netdev=nic{nic},romfile="));
        }
    }
    append
}

fn qemu(lab: &Lab, workspace: &Path, machine: &Machine, extra: &str) -> Result<Command> {
    let share = workspace.display();
    // On a busy machine Linux counts too few ticks when it checks the timer at boot, and gives up.
    let mut append = format!("console=ttyS0 panic=-1 quiet no_timer_check ipv6.disable=1 lab.share={share} {extra}");
    let mut command = match machine.nics {
        // The other QEMU has no igb.
        Nics::Vfio => newer_qemu::command(lab)?,
        Nics::None | Nics::Vdpa(_) => emulator::command(lab)?,
    };
    // Linux's driver for AMD's IOMMU needs cmpxchg16b.
    let cpu = if matches!(machine.nics, Nics::Vdpa(_)) { CPU.replace(",-cx16", "") } else { CPU.to_owned() };
    command.args(["-machine", "q35", "-cpu", &cpu, "-m", "6144", "-display", "none", "-nodefaults"]);
    // With two processors QEMU 7.2 hung in one of ten nested boots. The lab runs two machines with one each instead.
    command.args(["-no-reboot", "-smp", "1"]);
    match machine.clock {
        Clock::Real => {
            append += " ";
            append += FAST_KERNEL;
            command.args(["-accel", "tcg,thread=multi"])
        }
        Clock::Instructions => {
            append += " tsc=reliable";
            command.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"])
        }
    };
    // A device given before its IOMMU would not be behind it.
    append += add_nics(machine.nics, &mut command);
    command.arg("-fsdev").arg(format!("local,id=checkout,path={share},security_model=none"));
    command.args(["-device", "virtio-9p-pci,fsdev=checkout,mount_tag=checkout"]);
    command.arg("-kernel").arg(lab.kernel(machine.kernel, "bzImage")?);
    command.arg("-initrd").arg(lab.image(Image::FirstLevel, machine.kernel)?);
    command.arg("-append").arg(append);
    Ok(command)
}
