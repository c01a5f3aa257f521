//! A guest: what it is made of, and what can be done with it while it runs.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::console::{Console, Output, Silence};
use crate::lab::{self, Image, Kernel, Userland};
use crate::terminal::Terminal;
use crate::vmm::{Exit, Vmm, VmmCommand};

/// How long a guest may take to its init. The nested lab needs 5 s, and twice that under load.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// How long a command in the guest may take, unless the test says otherwise.
const COMMAND_LIMIT: Duration = Duration::from_secs(90);
/// How long the VMM may take to end once the guest is off.
const EXIT_LIMIT: Duration = Duration::from_secs(60);
/// Guests speak IPv4 only: every frame on a tap is then one that the test caused.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 ipv6.disable=1";

/// What a guest is made of. The default is one vCPU, 256 MiB and no device.
pub struct GuestSpec {
    kernel: Kernel,
    image: Image,
    cpus: u32,
    max_cpus: Option<u32>,
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
    /// A guest of `kernel`, given to the VMM as an ELF file.
    pub fn new(kernel: Kernel) -> GuestSpec {
        GuestSpec {
            kernel,
            image: Image::Vmlinux,
            cpus: 1,
            max_cpus: None,
            memory: "size=256M".into(),
            cmdline: CMDLINE.into(),
            userland: Userland::Plain,
            serial: "tty".into(),
            has_console: false,
            arguments: Vec::new(),
            inherited: Vec::new(),
            open_files: None,
            user: None,
        }
    }

    /// Gives the VMM the kernel as `image`.
    pub fn image(mut self, image: Image) -> GuestSpec {
        self.image = image;
        self
    }

    /// Gives the guest `cpus` vCPUs.
    pub fn cpus(mut self, cpus: u32) -> GuestSpec {
        self.cpus = cpus;
        self
    }

    /// Lets the guest have up to `cpus` vCPUs later.
    pub fn max_cpus(mut self, cpus: u32) -> GuestSpec {
        self.max_cpus = Some(cpus);
        self
    }

    /// Sets the value of `--memory`.
    pub fn memory(mut self, memory: &str) -> GuestSpec {
        self.memory = memory.into();
        self
    }

    /// Adds an argument to the kernel's command line.
    pub fn kernel_argument(mut self, argument: &str) -> GuestSpec {
        self.cmdline.push(' ');
        self.cmdline.push_str(argument);
        self
    }

    /// Puts the real `lspci` into the guest.
    pub fn with_lspci(mut self) -> GuestSpec {
        self.userland = Userland::Lspci;
        self
    }

    /// Puts the modules that [`Guest::load`] loads into the guest.
    pub fn with_modules(mut self) -> GuestSpec {
        self.userland = Userland::Modules;
        self
    }

    /// Sets the value of `--serial`, for a guest that [`Guest::boot_over`] boots.
    pub fn serial(mut self, serial: &str) -> GuestSpec {
        self.serial = serial.into();
        self
    }

    /// Adds a virtio console, by the value of `--console`.
    pub fn console(mut self, value: &str) -> GuestSpec {
        self.has_console = true;
        self.arguments(&["--console", value])
    }

    /// Adds a disk, by the value of `--disk`.
    pub fn disk(self, value: &str) -> GuestSpec {
        self.arguments(&["--disk", value])
    }

    /// Adds a NIC, by the value of `--net`.
    pub fn net(self, value: &str) -> GuestSpec {
        self.arguments(&["--net", value])
    }

    /// Configures a VF, by the value of `--net-vf`.
    pub fn net_vf(self, value: &str) -> GuestSpec {
        self.arguments(&["--net-vf", value])
    }

    /// Adds a NIC over tap queues that are passed in open; `value` is what follows `fd=[…]` in `--net`.
    pub fn net_by_fds(mut self, queues: Vec<OwnedFd>, value: &str) -> GuestSpec {
        let numbers: Vec<String> = queues.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        self.inherited.extend(queues);
        self.net(&format!("fd=[{}],{value}", numbers.join(",")))
    }

    /// Lets the VMM have `limit` files open and no more.
    pub fn open_files(mut self, limit: u64) -> GuestSpec {
        self.open_files = Some(limit);
        self
    }

    /// Lets the VMM run as the user `uid` with no group and no capability.
    pub fn user(mut self, uid: u32) -> GuestSpec {
        self.user = Some(uid);
        self
    }

    /// Adds arguments to the command line.
    pub fn arguments(mut self, arguments: &[&str]) -> GuestSpec {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// The command line of this guest.
    pub fn command(self) -> VmmCommand {
        let max = self.max_cpus.map_or(String::new(), |cpus| format!(",max={cpus}"));
        let command = VmmCommand::new()
            .arg("--kernel")
            .arg(lab::kernel_file(self.kernel, self.image))
            .arg("--initramfs")
            .arg(lab::initramfs(self.kernel, self.userland))
            .args(["--cmdline", &self.cmdline, "--serial", &self.serial])
            .args(["--cpus", &format!("boot={}{max}", self.cpus), "--memory", &self.memory])
            .args(self.arguments);
        let command = if self.has_console { command } else { command.args(["--console", "off"]) };
        let command = self.inherited.into_iter().fold(command, VmmCommand::inherit);
        let command = self.user.into_iter().fold(command, VmmCommand::user);
        self.open_files.into_iter().fold(command, VmmCommand::open_files)
    }
}

/// A guest that is up. It and its VMM end when this is dropped.
pub struct Guest {
    vmm: Vmm,
    console: Console,
    boot_time: Duration,
}

impl Guest {
    /// Boots a guest and waits for its init. Panics with what the guest and the VMM printed when that does not happen.
    pub fn boot(spec: GuestSpec) -> Guest {
        let mut vmm = spec.command().spawn();
        let console = Console::new(vmm.take_stdin(), vmm.take_stdout());
        Guest::await_init(vmm, console)
    }

    /// As [`Guest::boot`], over a serial port whose other end is not the VMM's streams: `connect` reaches it, once the VMM runs.
    pub fn boot_over(spec: GuestSpec, connect: impl FnOnce() -> Client) -> Guest {
        let vmm = spec.command().spawn();
        let client = connect();
        let console = Console::new(client.writer(), client);
        Guest::await_init(vmm, console)
    }

    /// As [`Guest::boot_over`], in `terminal`, which is not the one that init speaks over.
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

    /// From the start of the VMM's process to the guest's init, as this machine's clock saw it.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// The VMM that runs this guest.
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

    /// Runs one command, which must succeed, and returns what it printed without the last line end.
    pub fn ok(&mut self, command: &str) -> String {
        self.ok_within(command, COMMAND_LIMIT)
    }

    /// As [`Guest::ok`], for a command that may take longer.
    pub fn ok_within(&mut self, command: &str, limit: Duration) -> String {
        let Output { status, text } = self.run_within(command, limit);
        assert_eq!(status, 0, "`{command}` in the guest printed: {text}");
        text.trim_end_matches('\n').to_owned()
    }

    /// Waits until `command` in the guest succeeds.
    pub fn wait_for(&mut self, command: &str) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while self.run(command).status != 0 {
            assert!(Instant::now() < deadline, "`{command}` in the guest never succeeded");
        }
    }

    /// Loads a module and what it needs. The guest was made [`GuestSpec::with_modules`].
    pub fn load(&mut self, module: &str) {
        self.ok(&format!("for file in /extra/{module}/*; do [ ! -e $file ] || insmod $file || exit 1; done"));
    }

    /// Restarts the guest from inside and waits until it is up again.
    pub fn reboot(&mut self) {
        self.restart_by("reboot -f");
    }

    /// Runs a command that ends the running kernel, and waits until the next one is up.
    pub(crate) fn restart_by(&mut self, command: &str) {
        self.console.send(&format!("0 {command}\n"));
        self.wait_until_ready();
    }

    /// Waits until the guest is up again, after something outside made it start again.
    pub fn wait_for_restart(&mut self) {
        self.wait_until_ready();
    }

    /// Suspends the guest to idle, with every device in its lowest power state, and wakes it by its console.
    pub fn suspend_and_wake(&mut self) {
        let successes = "cat /sys/power/suspend_stats/success";
        let before: u32 = self.ok(successes).parse().unwrap();
        self.ok("echo enabled > /sys/class/tty/ttyS0/power/wakeup");
        let command = "echo freeze > /sys/power/state";
        let output = self.console.run_while_typing(command, COMMAND_LIMIT);
        let Output { status, text } = output.unwrap_or_else(|silence| self.fail(command, &silence));
        assert_eq!(status, 0, "suspending printed: {text}");
        assert_eq!(self.ok(successes), (before + 1).to_string(), "the guest slept");
    }

    /// Powers the guest off from inside and waits for the VMM's end.
    pub fn power_off(mut self) -> Exit {
        self.console.send("0 poweroff -f\n");
        self.vmm.wait(EXIT_LIMIT)
    }

    /// Asks the VMM to end with `signal` and waits until it has.
    pub fn stop_by(self, signal: i32) -> Exit {
        self.vmm.signal(signal);
        self.vmm.wait(EXIT_LIMIT)
    }

    /// Panics if the guest's kernel complained of the machine that it found.
    pub fn assert_kernel_has_no_complaint(&mut self) {
        let complaints =
            "can.t assign|firmware bug|\\[BUG|out of range|no space|WARNING: CPU|Call Trace|failed to assign";
        let found = self.run(&format!("dmesg | grep -iE \"{complaints}\""));
        assert_eq!(found.text, "", "the guest's kernel complains");
    }

    fn wait_until_ready(&mut self) {
        if let Err(silence) = self.console.wait_until_ready(BOOT_LIMIT) {
            self.fail("waiting for the guest's init", &silence);
        }
    }

    fn fail(&mut self, what: &str, silence: &Silence) -> ! {
        let why = match silence {
            Silence::TimedOut(limit) => format!("timed out after {} s", limit.as_secs()),
            Silence::Closed => "the VMM ended".to_owned(),
            Silence::Panicked => {
                // The rest of the panic's report is still on its way.
                std::thread::sleep(Duration::from_secs(1));
                "the guest's kernel panicked".to_owned()
            }
            Silence::Garbled => "the reply was garbled".to_owned(),
        };
        let transcript = self.console.transcript();
        let lines: Vec<&str> = transcript.lines().collect();
        let tail = lines[lines.len().saturating_sub(60)..].join("\n");
        panic!("{what}: {why}\n--- the guest's console:\n{tail}\n--- the VMM's errors:\n{}", self.vmm.errors());
    }
}
