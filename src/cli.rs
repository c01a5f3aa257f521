//! The command line, and what is wrong with one.

use std::error::Error;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Parser};
use vmm::Options;
use vmm::config::{
    ConfigError, ConsoleConfig, CpusConfig, MemoryConfig, NetConfig, NetVf, PayloadConfig, Problem, VmConfig, help,
};

/// The version of Cloud Hypervisor that the options are compatible with comes first: programs that start it read that.
const VERSION: &str = concat!(
    "v53.0.0\nSR-IOV emulation ",
    env!("CARGO_PKG_VERSION"),
    "; compatible with the command line of Cloud Hypervisor v53, and not a fork of it"
);

const EXAMPLE: &str = "\
Example: a guest with a NIC that reserves 8 virtual functions, the first one on a tap called tenant-a

  cloud-hypervisor --kernel vmlinuz --initramfs initrd --cmdline console=ttyS0 --serial tty \\
    --cpus boot=2 --memory size=1G \\
    --net id=pf0,tap=pf0,sriov_vfs=8 --net-vf pf=pf0,index=0,tap=tenant-a

Exit code:
  0  the guest powered off, or a signal ended it
  1  something is wrong with the configuration, the host or the guest
  2  the command line cannot be read: an unknown option or key, or a malformed value";

const CONSOLE_MODES: &str = "off, null, tty, pty, file=<path> or socket=<path>";

/// Options that Cloud Hypervisor has and this version has not.
const LATER: &[(&str, &str)] = &[
    ("--balloon", "memory balloons are"),
    ("--debug-console", "the debug console is"),
    ("--device", "passing host devices through is"),
    ("--disk", "disks are"),
    ("--event-monitor", "the event monitor is"),
    ("--firmware", "booting from firmware is"),
    ("--fs", "shared file systems are"),
    ("--gdb", "debugging by gdb is"),
    ("--generic-vhost-user", "vhost-user devices are"),
    ("--igvm", "booting from an IGVM file is"),
    ("--landlock", "Landlock is"),
    ("--landlock-rules", "Landlock is"),
    ("--log-format", "a choice of log format is"),
    ("--memory-zone", "memory zones are"),
    ("--no-shutdown", "staying after the guest's power-off is"),
    ("--numa", "NUMA nodes are"),
    ("--pci-segment", "further PCI segments are"),
    ("--platform", "platform settings are"),
    ("--pmem", "persistent memory is"),
    ("--pvpanic", "the panic device is"),
    ("--rate-limit-group", "rate limits are"),
    ("--restore", "restoring a snapshot is"),
    ("--rng", "the entropy device is"),
    ("--seccomp", "system call filters are"),
    ("--tpm", "TPMs are"),
    ("--user-device", "vfio-user devices are"),
    ("--vdpa", "vDPA devices are"),
    ("--vsock", "vsock devices are"),
    ("--watchdog", "the watchdog is"),
];

/// Runs a virtual machine whose NICs are SR-IOV devices.
#[derive(Debug, Parser)]
#[command(name = "cloud-hypervisor", version = VERSION, after_help = EXAMPLE, arg_required_else_help = true)]
pub struct Cli {
    /// Unix socket of the REST API
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        long_help = "Unix socket of the REST API: path=<path>, a path alone, or fd=<number> of a socket that listens already. \
                     Without a kernel, the VM is made by its clients"
    )]
    api_socket: Option<String>,

    /// Kernel command line
    #[arg(long, value_name = "text", requires = "kernel")]
    cmdline: Option<String>,

    /// Virtio console
    #[arg(
        long,
        value_name = "mode",
        requires = "kernel",
        long_help = "Virtio console: off or null, until there is one [default: off]"
    )]
    console: Option<String>,

    /// Virtual CPUs
    #[arg(long, value_name = "key=value,...", requires = "kernel", long_help = keys::<CpusConfig>("Virtual CPUs"))]
    cpus: Option<String>,

    /// Initial file system
    #[arg(long, value_name = "path", requires = "kernel")]
    initramfs: Option<PathBuf>,

    /// Kernel: a bzImage, or a vmlinux with a PVH entry
    #[arg(long, value_name = "path", required_unless_present = "api_socket")]
    kernel: Option<PathBuf>,

    /// Writes the log to this file in place of standard error
    #[arg(long, value_name = "path")]
    pub log_file: Option<PathBuf>,

    /// Guest memory
    #[arg(long, value_name = "key=value,...", requires = "kernel", long_help = keys::<MemoryConfig>("Guest memory"))]
    memory: Option<String>,

    /// NICs; a NIC with sriov_vfs is an SR-IOV physical function
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "kernel",
        long_help = keys::<NetConfig>("NICs; one with sriov_vfs is an SR-IOV physical function. Repeat for more")
    )]
    net: Vec<String>,

    /// Virtual functions that are not as their NIC makes them
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "kernel",
        long_help = keys::<NetVf>("Virtual functions that are not as their NIC makes them. Repeat for more")
    )]
    net_vf: Vec<String>,

    /// Serial port
    #[arg(long, value_name = "mode", requires = "kernel", long_help = format!("Serial port: {CONSOLE_MODES} [default: null]"))]
    serial: Option<String>,

    /// Logs more: -v tells what happens, -vv and -vvv how
    #[arg(short, action = ArgAction::Count)]
    pub verbose: u8,
}

/// The help of an option, made of the table that its parser is made of.
fn keys<T: vmm::config::Options>(about: &str) -> String {
    format!("{about}\n\n{}", help::<T>())
}

impl Cli {
    /// What the program is to do.
    ///
    /// # Errors
    ///
    /// The first value that cannot be read. Whether the values fit together is not looked at.
    pub fn into_options(mut self) -> Result<Options, Box<dyn Error>> {
        let api = self.api_socket.take().map(|text| text.parse()).transpose()?;
        let vm = if self.kernel.is_some() { Some(self.into_config()?) } else { None };
        Ok(Options { vm, api })
    }

    /// The VM that the command line describes.
    fn into_config(self) -> Result<VmConfig, ConfigError> {
        let mut config = VmConfig {
            payload: PayloadConfig { kernel: self.kernel, initramfs: self.initramfs, cmdline: self.cmdline },
            ..VmConfig::default()
        };
        if let Some(cpus) = self.cpus {
            config.cpus = cpus.parse()?;
        }
        if let Some(memory) = self.memory {
            config.memory = memory.parse()?;
        }
        if let Some(mode) = self.serial {
            config.serial = console("--serial", &mode)?;
        }
        if let Some(mode) = self.console {
            config.console = console("--console", &mode)?;
        }
        for net in self.net {
            config.net.push(net.parse()?);
        }
        for vf in self.net_vf {
            vf.parse::<NetVf>()?.add_to(&mut config.net)?;
        }
        Ok(config)
    }
}

fn console(option: &str, mode: &str) -> Result<ConsoleConfig, ConfigError> {
    mode.parse().map_err(|error: vmm::config::ParseConsoleError| ConfigError {
        subject: format!("{option} {mode}"),
        problem: Problem::Syntax(error.to_string()),
    })
}

/// What is wrong with the command line, in one line; `None` if it asks for help or for the version.
pub fn report(error: &clap::Error) -> Option<String> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return None;
        }
        ErrorKind::UnknownArgument => {
            let argument = error.get(ContextKind::InvalidArg);
            let later = LATER.iter().find(|(option, _)| argument == Some(&ContextValue::String(option.to_string())));
            if let Some((option, what)) = later {
                return Some(format!("{option}: {what} not in this version yet; leave it out"));
            }
        }
        _ => {}
    }
    // Paragraphs of text: what is wrong, perhaps a tip, then the usage, which --help tells better.
    let text = error.render().to_string();
    let text = text.split("\n\n").take_while(|paragraph| !paragraph.trim_start().starts_with("Usage:"));
    let paragraphs = text.map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let line = paragraphs.filter(|line| !line.starts_with("For more information")).collect::<Vec<_>>().join("; ");
    Some(format!("{}; see --help", line.trim_start_matches("error: ")))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn line(arguments: &[&str]) -> Option<String> {
        report(&Cli::try_parse_from([&["cloud-hypervisor"], arguments].concat()).unwrap_err())
    }

    #[test]
    fn the_options_are_consistent_and_sorted() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let options: Vec<_> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        assert!(options.is_sorted(), "{options:?}");
        assert!(LATER.is_sorted());
    }

    #[test]
    fn an_option_is_here_or_comes_later() {
        let command = Cli::command();
        let options: Vec<_> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        assert!(LATER.iter().all(|(option, _)| !options.contains(&option.trim_start_matches('-'))));
    }

    #[test]
    fn every_option_of_a_later_version_is_refused_by_name() {
        for (option, what) in LATER {
            let expected = format!("{option}: {what} not in this version yet; leave it out");
            assert_eq!(line(&["--kernel", "k", option]), Some(expected.clone()));
            assert_eq!(line(&[&format!("{option}=x")]), Some(expected));
        }
    }

    #[test]
    fn a_wrong_command_line_is_reported_in_one_line() {
        assert_eq!(line(&[]), None);
        assert_eq!(
            line(&["--serial", "tty"]).unwrap(),
            "the following required arguments were not provided: --kernel <path>; see --help"
        );
        assert_eq!(
            line(&["--kernel", "k", "--nett", "x"]).unwrap(),
            "unexpected argument '--nett' found; tip: a similar argument exists: '--net'; see --help"
        );
        assert_eq!(
            line(&["--kernel", "k", "--kernel", "l"]).unwrap(),
            "the argument '--kernel <path>' cannot be used multiple times; see --help"
        );
    }

    #[test]
    fn lists_are_given_at_once_or_one_by_one() {
        let arguments =
            ["c", "--kernel", "k", "--net", "id=a,sriov_vfs=2", "id=b", "--net-vf", "pf=a,index=1", "--net", "id=c"];
        let config = Cli::try_parse_from(arguments).unwrap().into_config().unwrap();
        let ids: Vec<_> = config.net.iter().filter_map(|net| net.id.as_deref()).collect();
        assert_eq!(ids, ["a", "b", "c"]);
        assert_eq!(config.net[0].vfs[0].index, 1);
    }
}
