//! A Linux guest: its configuration, and the operations of a test while it runs.

pub(crate) mod client;
pub(crate) mod console;
pub(crate) mod hypervisor_fw;
pub(crate) mod kexec;
pub(crate) mod pods;
pub(crate) mod program;
pub(crate) mod silence;
pub(crate) mod sriov;
pub(crate) mod tenant;
pub(crate) mod vfio;
pub(crate) mod x550;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::guest::client::Client;
use crate::guest::console::{Console, Output, Silence};
use crate::lab::{self, Image, Kernel, Userland};
use crate::vmm::terminal::Terminal;
use crate::vmm::{Exit, Vmm, VmmCommand};

/// Time that a guest may take to start its init. The nested lab needs 5 s, and 10 s under load.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// Time that a command in the guest may take by default.
const COMMAND_LIMIT: Duration = Duration::from_secs(90);
/// Time that the VMM may take to exit after the guest has powered off.
const EXIT_LIMIT: Duration = Duration::from_secs(60);
/// The time in which a guest that does not hang prints something, also under load.
const SETTLE: Duration = Duration::from_secs(5);
/// Seconds until a guest shows its backtrace, at most.
const BACKTRACE: u64 = 60;
/// Guests use IPv4 only, so that the test causes every frame on a tap. On an NMI they show a backtrace.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 unknown_nmi_panic ipv6.disable=1";

/// The configuration of a guest. The default is one vCPU, 256 MiB of memory and no devices.
pub struct GuestSpec {
    kernel: Kernel,
    image: Image,
    /// The option that names firmware, and the file.
    firmware: Option<(&'static str, PathBuf)>,
    cpus: u32,
    max_cpus: Option<u32>,
    topology: Option<String>,
    has_hyperv: bool,
    memory: String,
    cmdline: String,
    userland: Userland,
    serial: String,
    has_console: bool,
    arguments: Vec<String>,
    inherited: Vec<OwnedFd>,
    open_files: Option<u64>,
    user: Option<u32>,
}

impl GuestSpec {
    /// A guest that boots `kernel` from its ELF file.
    pub fn new(kernel: Kernel) -> GuestSpec {
        GuestSpec {
            kernel,
            image: Image::Vmlinux,
            firmware: None,
            cpus: 1,
            max_cpus: None,
            topology: None,
            has_hyperv: false,
            memory: "size=256M".into(),
            cmdline: [CMDLINE, &lab::kernel_parameters()].join(" ").trim_end().into(),
            userland: Userland::Plain,
            serial: "tty".into(),
            has_console: false,
            arguments: Vec::new(),
            inherited: Vec::new(),
            open_files: None,
            user: None,
        }
    }

    /// A guest whose firmware boots Linux 6.12 from `disk`, a copy of [`lab::firmware_disk`].
    pub fn from_firmware(disk: &Path) -> GuestSpec {
        lab::read_firmware_into_memory();
        let firmware = Some(("--firmware", lab::firmware()));
        let spec = GuestSpec { firmware, ..GuestSpec::new(Kernel::V6_12) };
        spec.memory("size=512M").disk(&format!("path={}", disk.display()))
    }

    /// Passes the firmware with `--kernel`.
    pub fn firmware_as_kernel(mut self) -> GuestSpec {
        self.firmware = Some(("--kernel", lab::firmware()));
        self
    }

    /// A guest with the firmware `file` that `option` names. Its disk decides which kernel boots.
    pub(crate) fn with_firmware(option: &'static str, file: &Path) -> GuestSpec {
        GuestSpec { firmware: Some((option, file.to_owned())), ..GuestSpec::new(Kernel::V6_12) }
    }

    /// Boots the kernel from another form of its image.
    pub fn image(mut self, image: Image) -> GuestSpec {
        self.image = image;
        self
    }

    /// Sets the number of vCPUs.
    pub fn cpus(mut self, cpus: u32) -> GuestSpec {
        self.cpus = cpus;
        self
    }

    /// Sets the number of vCPUs that the guest may have after a resize.
    pub fn max_cpus(mut self, cpus: u32) -> GuestSpec {
        self.max_cpus = Some(cpus);
        self
    }

    /// Sets the shape of the vCPUs: threads of a core, cores of a die, dies of a package, packages.
    pub fn topology(mut self, shape: [u32; 4]) -> GuestSpec {
        self.topology = Some(shape.map(|count| count.to_string()).join(":"));
        self
    }

    /// Gives the guest Hyper-V's hypervisor interface instead of KVM's.
    pub fn hyperv(mut self) -> GuestSpec {
        self.has_hyperv = true;
        self
    }

    /// Sets the value of `--memory`.
    pub fn memory(mut self, memory: &str) -> GuestSpec {
        self.memory = memory.into();
        self
    }

    /// Appends an argument to the kernel's command line.
    pub fn kernel_argument(mut self, argument: &str) -> GuestSpec {
        self.cmdline.push(' ');
        self.cmdline.push_str(argument);
        self
    }

    /// Installs the real `lspci` in the guest.
    pub fn with_lspci(mut self) -> GuestSpec {
        self.userland = Userland::Lspci;
        self
    }

    /// Installs the modules for [`Guest::load`] in the guest.
    pub fn with_modules(mut self) -> GuestSpec {
        self.userland = Userland::Modules;
        self
    }

    /// Installs the modules and DPDK's testpmd in the guest, whose kernel must have a driver for the IOMMU.
    pub fn with_dpdk(mut self) -> GuestSpec {
        self.userland = Userland::Dpdk;
        self
    }

    /// Installs the modules and programs that configure NICs in the guest, whose kernel must be a generic one.
    pub fn with_nic_tools(mut self) -> GuestSpec {
        self.userland = Userland::NicTools;
        self
    }

    /// Sets the value of `--serial`. Boot such a guest with [`Guest::boot_over`].
    pub fn serial(mut self, serial: &str) -> GuestSpec {
        self.serial = serial.into();
        self
    }

    /// Adds a virtio console; `value` is that of `--console`.
    pub fn console(mut self, value: &str) -> GuestSpec {
        self.has_console = true;
        self.arguments(&["--console", value])
    }

    /// Adds a disk; `value` is that of `--disk`.
    pub fn disk(self, value: &str) -> GuestSpec {
        self.arguments(&["--disk", value])
    }

    /// Adds a NIC; `value` is that of `--net`.
    pub fn net(self, value: &str) -> GuestSpec {
        self.arguments(&["--net", value])
    }

    /// Overrides settings of a VF; `value` is that of `--net-vf`.
    pub fn net_vf(self, value: &str) -> GuestSpec {
        self.arguments(&["--net-vf", value])
    }

    /// Adds a NIC over tap queues that the VMM inherits; `value` follows `fd=[…]` in `--net`.
    pub fn net_by_fds(mut self, queues: Vec<OwnedFd>, value: &str) -> GuestSpec {
        let numbers: Vec<String> = queues.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        self.inherited.extend(queues);
        self.net(&format!("fd=[{}],{value}", numbers.join(",")))
    }

    /// Makes the VMM inherit `files`, under the same numbers.
    pub fn inheriting(mut self, files: Vec<OwnedFd>) -> GuestSpec {
        self.inherited.extend(files);
        self
    }

    /// Limits the VMM to `limit` open files.
    pub fn open_files(mut self, limit: u64) -> GuestSpec {
        self.open_files = Some(limit);
        self
    }

    /// Runs the VMM as the user `uid`, without groups or capabilities.
    pub fn user(mut self, uid: u32) -> GuestSpec {
        self.user = Some(uid);
        self
    }

    /// Appends arguments to the VMM's command line.
    pub fn arguments(mut self, arguments: &[&str]) -> GuestSpec {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// The VMM's command line for this guest.
    pub fn command(self) -> VmmCommand {
        let max = self.max_cpus.map_or(String::new(), |cpus| format!(",max={cpus}"));
        let topology = self.topology.map_or(String::new(), |shape| format!(",topology={shape}"));
        let hyperv = if self.has_hyperv { ",kvm_hyperv=on" } else { "" };
        let command = match self.firmware {
            Some((option, firmware)) => VmmCommand::new().arg(option).arg(firmware),
            None => VmmCommand::new()
                .arg("--kernel")
                .arg(lab::kernel_file(self.kernel, self.image))
                .arg("--initramfs")
                .arg(lab::initramfs(self.kernel, self.userland))
                .args(["--cmdline", &self.cmdline]),
        };
        let command = command
            .args(["--serial", &self.serial])
            .args(["--cpus", &format!("boot={}{max}{topology}{hyperv}", self.cpus), "--memory", &self.memory])
            .args(self.arguments);
        let command = if self.has_console { command } else { command.args(["--console", "off"]) };
        let command = self.inherited.into_iter().fold(command, VmmCommand::inherit);
        let command = self.user.into_iter().fold(command, VmmCommand::user);
        self.open_files.into_iter().fold(command, VmmCommand::open_files)
    }
}

/// A guest that has booted. Dropping it kills its VMM.
pub struct Guest {
    vmm: Vmm,
    console: Console,
    boot_time: Duration,
}

impl Guest {
    /// Boots a guest and waits for its init. If that fails, panics with the output of the guest and the VMM.
    pub fn boot(spec: GuestSpec) -> Guest {
        let mut vmm = spec.command().spawn();
        let console = Console::new(vmm.take_stdin(), vmm.take_stdout());
        Guest::await_init(vmm, console)
    }

    /// As [`Guest::boot`], over a serial port that is not the VMM's standard streams: `connect` connects to it once
    /// the VMM runs.
    pub fn boot_over(spec: GuestSpec, connect: impl FnOnce() -> Client) -> Guest {
        let vmm = spec.command().spawn();
        let client = connect();
        let console = Console::new(client.writer(), client);
        Guest::await_init(vmm, console)
    }

    /// A guest that a client of the API creates: `create` sends the requests to the VMM that `command` starts. The
    /// guest's serial port must be the VMM's standard streams.
    pub fn boot_by(command: VmmCommand, create: impl FnOnce()) -> Guest {
        let mut vmm = command.spawn();
        create();
        let console = Console::new(vmm.take_stdin(), vmm.take_stdout());
        Guest::await_init(vmm, console)
    }

    /// A guest that is restored by the VMM that `command` starts, whose standard streams are its serial port. It may be
    /// paused.
    pub fn restored_by(command: VmmCommand) -> Guest {
        let mut vmm = command.spawn();
        let console = Console::new(vmm.take_stdin(), vmm.take_stdout());
        Guest { vmm, console, boot_time: Duration::ZERO }
    }

    /// A guest of a running VMM, whose serial port `client` is connected to. It may not have booted yet.
    pub fn over(vmm: Vmm, client: Client) -> Guest {
        Guest { vmm, console: Console::new(client.writer(), client), boot_time: Duration::ZERO }
    }

    /// As [`Guest::boot_over`], with the VMM in `terminal`, which is not the serial port.
    pub fn boot_in(terminal: &Terminal, spec: GuestSpec, connect: impl FnOnce() -> Client) -> Guest {
        let vmm = terminal.spawn(spec.command());
        let client = connect();
        let console = Console::new(client.writer(), client);
        Guest::await_init(vmm, console)
    }

    fn await_init(vmm: Vmm, console: Console) -> Guest {
        let mut guest = Guest { vmm, console, boot_time: Duration::ZERO };
        guest.wait_until_ready();
        guest.boot_time = guest.vmm.started().elapsed();
        guest
    }

    /// The time from the start of the VMM's process to the guest's init, by the machine's clock.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// The VMM's process.
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// Runs one command in the guest's shell.
    pub fn run(&mut self, command: &str) -> Output {
        self.run_within(command, COMMAND_LIMIT)
    }

    /// As [`Guest::run`], for a command that may take longer.
    pub fn run_within(&mut self, command: &str, limit: Duration) -> Output {
        let result = self.console.run(command, limit);
        result.unwrap_or_else(|silence| self.fail(&format!("`{command}` in the guest"), &silence))
    }

    /// Runs one command, which must succeed, and returns its output without the trailing newline.
    pub fn ok(&mut self, command: &str) -> String {
        self.ok_within(command, COMMAND_LIMIT)
    }

    /// As [`Guest::ok`], for a command that may take longer.
    pub fn ok_within(&mut self, command: &str, limit: Duration) -> String {
        let Output { status, text } = self.run_within(command, limit);
        assert_eq!(status, 0, "`{command}` failed in the guest: {text}");
        text.trim_end_matches('\n').to_owned()
    }

    /// Repeats `command` in the guest until it succeeds.
    pub fn wait_for(&mut self, command: &str) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while self.run(command).status != 0 {
            assert!(Instant::now() < deadline, "`{command}` never succeeded in the guest");
        }
    }

    /// Loads a module and its dependencies. The guest must be booted [`GuestSpec::with_modules`].
    pub fn load(&mut self, module: &str) {
        // A module that is also another one's dependency may be loaded already.
        let name = "$(basename $file .ko | sed 's/^[0-9]*-//; y/-/_/')";
        self.ok(&format!(
            "for file in /extra/{module}/*; do \
             [ ! -e $file ] || [ -d /sys/module/{name} ] || insmod $file || exit 1; done"
        ));
    }

    /// Reboots the guest from inside and waits until it is up again.
    pub fn reboot(&mut self) {
        self.restart_by("reboot -f");
    }

    /// Makes the guest's kernel panic. Unless its command line has `panic=0`, it then reboots.
    pub fn crash(&mut self) {
        self.console.send("0 echo c > /proc/sysrq-trigger\n");
        if let Err(silence) = self.console.wait_for_panic(COMMAND_LIMIT) {
            self.fail("waiting for the panic of the guest's kernel", &silence);
        }
    }

    /// Runs a command that ends the running kernel, and waits until the next kernel is up.
    pub(crate) fn restart_by(&mut self, command: &str) {
        self.send_last_command(command);
        self.wait_until_ready();
    }

    /// Waits until the guest is up again after the host has restarted it.
    pub fn wait_for_restart(&mut self) {
        self.wait_until_ready();
    }

    /// Suspends the guest to idle, which puts every device into its lowest power state, and wakes it with a key on its
    /// console.
    pub fn suspend_and_wake(&mut self) {
        let successes = "cat /sys/power/suspend_stats/success";
        let before: u32 = self.ok(successes).parse().unwrap();
        self.ok("echo enabled > /sys/class/tty/ttyS0/power/wakeup");
        let command = "echo freeze > /sys/power/state";
        let output = self.console.run_while_typing(command, COMMAND_LIMIT);
        let Output { status, text } = output.unwrap_or_else(|silence| self.fail(command, &silence));
        assert_eq!(status, 0, "suspending failed: {text}");
        assert_eq!(self.ok(successes), (before + 1).to_string(), "suspends that succeeded");
    }

    /// Runs a command that saves the guest on a disk and ends its VMM. Returns the number of the command, to which the
    /// guest replies after it has continued.
    pub fn leave_by(mut self, command: &str, limit: Duration) -> (Exit, u32) {
        let number = self.console.start(command);
        if !self.vmm.exits_within(limit) {
            self.fail(command, &Silence::TimedOut(limit));
        }
        (self.vmm.wait(EXIT_LIMIT), number)
    }

    /// Runs a command that replaces this guest by the one saved by command `number`, and waits for the reply to that,
    /// which must be a success.
    pub fn continue_by(&mut self, command: &str, number: u32, limit: Duration) {
        self.console.start(command);
        let output = self.console.finish(number, limit);
        let Output { status, text } = output.unwrap_or_else(|silence| self.fail(command, &silence));
        assert_eq!(status, 0, "the guest that left says: {text}");
    }

    /// Powers the guest off from inside and waits until the VMM has exited.
    pub fn power_off(mut self) -> Exit {
        self.console.send("0 poweroff -f\n");
        if !self.vmm.exits_within(EXIT_LIMIT) {
            self.fail("powering off", &Silence::TimedOut(EXIT_LIMIT));
        }
        self.vmm.wait(EXIT_LIMIT)
    }

    /// Calls `end`, and waits until the VMM has exited because of that.
    pub fn end_by(self, end: impl FnOnce()) -> Exit {
        end();
        self.vmm.wait(EXIT_LIMIT)
    }

    /// Sends `signal` to the VMM and waits until it has exited.
    pub fn stop_by(self, signal: i32) -> Exit {
        self.vmm.signal(signal);
        self.vmm.wait(EXIT_LIMIT)
    }

    /// Asserts that the guest's kernel logged no complaint about the machine or its drivers.
    pub fn assert_kernel_has_no_complaint(&mut self) {
        let complaints =
            "can.t assign|firmware bug|\\[BUG|out of range|no space|WARNING: CPU|Call Trace|failed to assign";
        let found = self.run(&format!("dmesg | grep -iE \"{complaints}\""));
        assert_eq!(found.text, "", "the guest's kernel has complaints");
    }

    fn wait_until_ready(&mut self) {
        self.wait_until_ready_within(BOOT_LIMIT);
    }

    /// Waits for the guest's init, which may take longer than usual.
    pub(crate) fn wait_until_ready_within(&mut self, limit: Duration) {
        if let Err(silence) = self.console.wait_until_ready(limit) {
            self.fail("waiting for the guest's init", &silence);
        }
    }

    /// Waits until the serial port has printed `text`, even before Linux runs.
    pub(crate) fn wait_for_text_within(&mut self, text: &str, limit: Duration) {
        if let Err(silence) = self.console.wait_for_text(text, limit) {
            self.fail(&format!("waiting for {text:?}"), &silence);
        }
    }

    /// All that the serial port has printed.
    pub fn transcript(&self) -> String {
        self.console.transcript()
    }

    /// Types a command that ends the running kernel.
    pub(crate) fn send_last_command(&mut self, command: &str) {
        self.console.send(&format!("0 {command}\n"));
    }

    fn fail(&mut self, what: &str, silence: &Silence) -> ! {
        let report = if matches!(silence, Silence::TimedOut(_)) { self.report_silence() } else { String::new() };
        let why = match silence {
            Silence::TimedOut(limit) => format!("timed out after {} s", limit.as_secs()),
            Silence::Closed => "the VMM ended".to_owned(),
            Silence::Panicked => {
                // Wait for the rest of the panic's report.
                std::thread::sleep(Duration::from_secs(1));
                "the guest's kernel panicked".to_owned()
            }
            Silence::Garbled => "the reply was garbled".to_owned(),
        };
        let transcript = self.console.transcript();
        let lines: Vec<&str> = transcript.lines().collect();
        let tail = lines[lines.len().saturating_sub(60)..].join("\n");
        let errors = self.vmm.errors();
        panic!("{what}: {why}\n--- the guest's console:\n{tail}\n--- the VMM's errors:\n{errors}\n{report}");
    }

    /// Describes the VMM and KVM. Then makes the vCPUs enter the guest again, and types a line: a guest that only
    /// continues then had an undelivered interrupt. If it still does not, sends an NMI, which shows where it hangs.
    fn report_silence(&mut self) -> String {
        let (mut report, first) = silence::report(&self.vmm);
        let mut received = self.console.transcript().len();
        let mut grown = |console: &Console| {
            std::thread::sleep(SETTLE);
            let before = std::mem::replace(&mut received, console.transcript().len());
            received - before
        };
        let untouched = grown(&self.console);
        silence::reenter(&self.vmm);
        let entered = grown(&self.console);
        self.console.send("\n");
        let typed = grown(&self.console);
        report += &silence::progress(&self.vmm, &first);
        let mut interrupted = 0;
        if untouched + entered + typed == 0 {
            report += &silence::interrupt(&self.vmm);
            // A backtrace takes long to print under load.
            for _ in 0..BACKTRACE / SETTLE.as_secs() {
                let more = grown(&self.console);
                interrupted += more;
                if more == 0 && interrupted > 0 {
                    break;
                }
            }
        }
        format!(
            "{report}--- bytes from the guest in {} s each: {untouched} untouched, {entered} after its vCPUs entered \
             it again, {typed} after a key; {interrupted} after an NMI",
            SETTLE.as_secs()
        )
    }
}
