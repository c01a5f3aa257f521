//! The options that describe a virtual machine, shared by cloud-hypervisor and ch-remote.
//!
//! [`table`] has one entry per option. Name, keys and help of most are those of the struct that it is parsed into.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, FromArgMatches, value_parser};
use vm_api::config::kinds::{KINDS, Kind};
use vm_api::config::{
    BalloonConfig, ConfigError, ConsoleConfig, CpusConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig, NetConfig,
    NetVf, NumaConfig, Options, PciSegmentConfig, PlatformConfig, Problem, RateLimitGroupConfig, RngConfig, RtcConfig,
    TpmConfig, VmConfig, help,
};

const CONSOLE_MODES: &str = "off, null, tty, pty, file=<path> or socket=<path>";

const BOOT: &str = "Boot";
const MACHINE: &str = "Machine";
const DEVICES: &str = "Devices";

/// The most used options, which the help has first.
pub(crate) const FIRST: [&str; 11] =
    ["kernel", "firmware", "initramfs", "cmdline", "cpus", "memory", "disk", "net", "net-vf", "serial", "console"];

/// Groups of options: those that describe a VM, and those of which one is required for a VM.
const VM: &str = "vm";
const PAYLOAD: &str = "payload";

/// An option of the command line.
struct VmOption {
    /// Name, without hyphens in front.
    name: &'static str,
    heading: &'static str,
    brief: &'static str,
    /// Text of `--help`, if it is longer than `brief`.
    long: Option<Box<dyn Fn() -> String>>,
    /// Option or group without which this one has no effect.
    requires: Option<&'static str>,
    takes: Takes,
}

/// Value of an option, and its place in a VM.
enum Takes {
    /// No value.
    Nothing(fn(&mut VmConfig)),
    Path(fn(&mut VmConfig, PathBuf)),
    Text(Text),
}

/// Function that parses a value and puts it into a configuration.
type Setter = dyn Fn(&mut VmConfig, &str) -> Result<(), ConfigError>;

/// A textual value.
struct Text {
    syntax: &'static str,
    times: Times,
    set: Box<Setter>,
}

/// Number of values.
#[derive(Clone, Copy)]
enum Times {
    Once,
    /// The value may be left out.
    OnceOrEmpty,
    Often,
}

/// All options. If several are wrong, the error is that of the first in this order.
fn table() -> Vec<VmOption> {
    let mut options = vec![
        path("kernel", "Kernel: a bzImage, or a vmlinux with a PVH entry", |vm, path| vm.payload.kernel = Some(path))
            .alone(),
        path(
            "firmware",
            "Firmware that boots from a disk, instead of a kernel: an ELF file with a PVH entry, such as CLOUDHV.fd \
             or hypervisor-fw",
            |vm, path| vm.payload.firmware = Some(path),
        )
        .alone(),
        path("initramfs", "Initial RAM file system", |vm, path| vm.payload.initramfs = Some(path)),
        text("cmdline", BOOT, "Kernel command line", "text", |vm, text| {
            vm.payload.cmdline = Some(text.to_string());
            Ok(())
        }),
        flag("watchdog", DEVICES, "Watchdog: resets the guest if it stops pinging the device", |vm| vm.watchdog = true),
        flag("pvpanic", DEVICES, "pvpanic: reports guest panics as events", |vm| vm.pvpanic = true),
        flag("landlock", MACHINE, "Confine the program to the files that the VM's options name", |vm| {
            vm.landlock_enable = true;
        })
        .long(
            "Restrict this program by Landlock to the files that the VM's options name, which must exist, and to \
             no TCP",
        ),
        one(MACHINE, "Virtual CPUs", |vm, cpus: CpusConfig| vm.cpus = cpus),
        one(MACHINE, "Guest memory", |vm, memory: MemoryConfig| vm.memory = memory),
        many(MACHINE, "Parts of the guest memory with their own properties", |vm, zone: MemoryZoneConfig| {
            vm.memory.zones.push(zone);
        })
        .keys::<MemoryZoneConfig>(
            "Parts of the guest memory with properties of their own, with --memory size=0. Repeat for more",
        ),
        one(DEVICES, "Entropy device", |vm, rng: RngConfig| vm.rng = rng)
            .keys::<RngConfig>("Entropy device. Every VM has one"),
        one(DEVICES, "Clock with the host's time", |vm, rtc: RtcConfig| vm.rtc = Some(rtc))
            .keys::<RtcConfig>("Virtio clock, which shows the host's UTC. Keys are optional")
            .times(Times::OnceOrEmpty),
        one(DEVICES, "Balloon", |vm, balloon: BalloonConfig| vm.balloon = Some(balloon))
            .keys::<BalloonConfig>("Balloon: returns guest memory to the host"),
        text("serial", DEVICES, "Serial port", "mode", |vm, mode| {
            vm.serial = console("--serial", mode)?;
            Ok(())
        })
        .long(format!("Serial port: {CONSOLE_MODES} [default: null]")),
        text("console", DEVICES, "Virtio console", "mode", |vm, mode| {
            vm.console = console("--console", mode)?;
            Ok(())
        })
        .long(format!(
            "Virtio console (hvc0 in the guest): {CONSOLE_MODES} [default: tty]\n\nKeys of the device may follow: \
             id=<name> [default: __console], pci_segment=<number>, pci_device_id=<number>"
        )),
        text(
            "debug-console",
            DEVICES,
            "Debug console: I/O port for firmware log output",
            "mode[,iobase=<port>]",
            |vm, text| {
                vm.debug_console = text.parse()?;
                Ok(())
            },
        )
        .long(
            "Debug console, an I/O port for firmware log output: off, null, tty, pty or \
             file=<path>, with or without iobase=<port> [default: off,iobase=0xe9]",
        ),
        many(
            MACHINE,
            "Weight of each PCI segment's share of the address space for PCI memory",
            |vm, segment: PciSegmentConfig| vm.pci_segments.push(segment),
        ),
        many(MACHINE, "NUMA nodes of the guest", |vm, node: NumaConfig| vm.numa.push(node)),
        one(DEVICES, "TPM 2.0, backed by swtpm", |vm, tpm: TpmConfig| vm.tpm = Some(tpm)),
        one(MACHINE, "The machine as a whole", |vm, platform: PlatformConfig| vm.platform = Some(platform)),
        many(DEVICES, "Rate limits that several disks share", |vm, group: RateLimitGroupConfig| {
            vm.rate_limit_groups.push(group);
        }),
        many(MACHINE, "Further files that the program may use with --landlock", |vm, rule: LandlockConfig| {
            vm.landlock_rules.push(rule)
        })
        .keys::<LandlockConfig>(
            "Further files that the program may use with --landlock, such as those of devices that are added later. \
             Repeat for more",
        )
        .requires("landlock"),
    ];
    options.extend(KINDS.iter().map(device));
    // After the NICs.
    options.push(
        text(name::<NetVf>(), DEVICES, "Settings of single VFs, instead of the PF's defaults", KEYS, |vm, vf| {
            let ids = vm.ids().of::<NetConfig>();
            vf.parse::<NetVf>()?.add_to(&mut vm.net, &ids)
        })
        .keys::<NetVf>("Settings of one VF, or a range of VFs, instead of the PF's defaults. Repeat for more VFs")
        .times(Times::Often),
    );
    options
}

/// Form of a value that has keys.
const KEYS: &str = "key=value,...";

fn name<T: Options>() -> &'static str {
    T::OPTION.trim_start_matches('-')
}

fn option(name: &'static str, heading: &'static str, brief: &'static str, takes: Takes) -> VmOption {
    VmOption { name, heading, brief, long: None, requires: Some(PAYLOAD), takes }
}

fn flag(name: &'static str, heading: &'static str, brief: &'static str, set: fn(&mut VmConfig)) -> VmOption {
    option(name, heading, brief, Takes::Nothing(set))
}

/// The path of a file that the guest boots.
fn path(name: &'static str, brief: &'static str, set: fn(&mut VmConfig, PathBuf)) -> VmOption {
    option(name, BOOT, brief, Takes::Path(set))
}

fn text(
    name: &'static str,
    heading: &'static str,
    brief: &'static str,
    syntax: &'static str,
    set: impl Fn(&mut VmConfig, &str) -> Result<(), ConfigError> + 'static,
) -> VmOption {
    option(name, heading, brief, Takes::Text(Text { syntax, times: Times::Once, set: Box::new(set) }))
}

/// An option that is parsed into a `T`.
fn one<T: Options + FromStr<Err = ConfigError> + 'static>(
    heading: &'static str,
    brief: &'static str,
    set: fn(&mut VmConfig, T),
) -> VmOption {
    text(name::<T>(), heading, brief, KEYS, move |vm, text| text.parse().map(|value| set(vm, value))).keys::<T>(brief)
}

/// As [`one`], for a list.
fn many<T: Options + FromStr<Err = ConfigError> + 'static>(
    heading: &'static str,
    brief: &'static str,
    push: fn(&mut VmConfig, T),
) -> VmOption {
    let long = move || keys::<T>(&format!("{brief}. Repeat for more"));
    VmOption { long: Some(Box::new(long)), ..one(heading, brief, push) }.times(Times::Often)
}

/// An option for devices of a kind that can also be added later.
fn device(kind: &'static Kind) -> VmOption {
    let Kind { option, texts, is_single, keys, add, .. } = kind;
    let name = option.trim_start_matches('-');
    let (times, more) = if *is_single { (Times::Once, "") } else { (Times::Often, ". Repeat for more") };
    let long = move || format!("{}{more}\n\n{}", texts.about, keys());
    let option = text(name, DEVICES, texts.brief, KEYS, add).times(times);
    VmOption { long: Some(Box::new(long)), ..option }
}

impl VmOption {
    fn long(self, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { long: Some(Box::new(move || text.clone())), ..self }
    }

    /// Sets `--help` to `about` and the keys of `T`.
    fn keys<T: Options>(self, about: &'static str) -> Self {
        Self { long: Some(Box::new(move || keys::<T>(about))), ..self }
    }

    fn times(mut self, number: Times) -> Self {
        if let Takes::Text(text) = &mut self.takes {
            text.times = number;
        }
        self
    }

    const fn requires(mut self, other: &'static str) -> Self {
        self.requires = Some(other);
        self
    }

    /// Makes this one of the options without which there is no VM.
    const fn alone(mut self) -> Self {
        self.requires = None;
        self
    }

    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).help_heading(self.heading).help(self.brief);
        let arg = match &self.long {
            Some(long) => arg.long_help(long()),
            None => arg,
        };
        let arg = match self.requires {
            Some(other) => arg.requires(other),
            None => arg.group(PAYLOAD),
        };
        match &self.takes {
            Takes::Nothing(_) => arg.action(ArgAction::SetTrue),
            Takes::Path(_) => arg.value_name("path").value_parser(value_parser!(PathBuf)),
            Takes::Text(Text { syntax, times, .. }) => {
                let arg = arg.value_name(syntax);
                match times {
                    Times::Once => arg,
                    Times::OnceOrEmpty => arg.num_args(0..=1).default_missing_value(""),
                    Times::Often => arg.num_args(1..).action(ArgAction::Append),
                }
            }
        }
    }

    /// The values given for this option, if it is given.
    fn given(&self, matches: &mut ArgMatches) -> Option<Given> {
        match self.takes {
            Takes::Nothing(_) => matches.get_flag(self.name).then_some(Given::Flag),
            Takes::Path(_) => matches.remove_one(self.name).map(Given::Path),
            Takes::Text(_) => Some(Given::Texts(matches.remove_many(self.name)?.collect())),
        }
    }

    fn apply(&self, vm: &mut VmConfig, given: Given) -> Result<(), ConfigError> {
        match (&self.takes, given) {
            (Takes::Nothing(set), Given::Flag) => set(vm),
            (Takes::Path(set), Given::Path(path)) => set(vm, path),
            (Takes::Text(text), Given::Texts(values)) => {
                return values.iter().try_for_each(|value| (text.set)(vm, value));
            }
            _ => {}
        }
        Ok(())
    }
}

/// The help of an option, generated from the struct that it is parsed into.
pub(crate) fn keys<T: Options>(about: &str) -> String {
    format!("{about}\n\n{}", help::<T>())
}

fn console(option: &str, mode: &str) -> Result<ConsoleConfig, ConfigError> {
    mode.parse().map_err(|error: vm_api::config::ParseConsoleError| ConfigError {
        subject: format!("{option} {mode}"),
        problem: Problem::Syntax(error.to_string()),
    })
}

/// The values of an option.
#[derive(Debug, Clone)]
enum Given {
    Flag,
    Path(PathBuf),
    Texts(Vec<String>),
}

/// A virtual machine: the given options, by name.
#[derive(Debug, Default, Clone)]
pub(crate) struct VmOptions(BTreeMap<&'static str, Given>);

impl VmOptions {
    /// True if a virtual machine is described.
    pub(crate) fn is_given(&self) -> bool {
        self.0.contains_key("kernel") || self.0.contains_key("firmware")
    }

    /// The described virtual machine.
    ///
    /// # Errors
    ///
    /// Fails with the first invalid value. Consistency of the values is not checked.
    pub(crate) fn into_config(mut self) -> Result<VmConfig, ConfigError> {
        let mut vm = VmConfig::default();
        for option in table() {
            if let Some(given) = self.0.remove(option.name) {
                option.apply(&mut vm, given)?;
            }
        }
        Ok(vm)
    }
}

impl FromArgMatches for VmOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Self::from_arg_matches_mut(&mut matches.clone())
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, clap::Error> {
        let given = |option: VmOption| Some((option.name, option.given(matches)?));
        Ok(Self(table().into_iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.extend(Self::from_arg_matches(matches)?.0);
        Ok(())
    }
}

impl Args for VmOptions {
    fn augment_args(command: Command) -> Command {
        let mut options = table();
        // The order of the help: the most used, then the others by name.
        let place = |name| FIRST.iter().position(|first| *first == name).unwrap_or(FIRST.len());
        options.sort_by_key(|option| (place(option.name), option.name));
        let all = ArgGroup::new(VM).multiple(true).args(options.iter().map(|option| option.name));
        let command = command.group(ArgGroup::new(PAYLOAD).multiple(true));
        command.args(options.iter().map(VmOption::arg)).group(all)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
