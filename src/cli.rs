//! The command line, and what is wrong with one.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Parser};
use vmm::Options;
use vmm::config::{ConfigError, VmConfig};

use crate::vm_options::VmOptions;

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

/// Options that Cloud Hypervisor has and this version has not.
const LATER: &[(&str, &str)] = &[
    ("--balloon", "memory balloons are"),
    ("--debug-console", "the debug console is"),
    ("--device", "passing host devices through is"),
    ("--firmware", "booting from firmware is"),
    ("--fs", "shared file systems are"),
    ("--gdb", "debugging by gdb is"),
    ("--generic-vhost-user", "vhost-user devices are"),
    ("--igvm", "booting from an IGVM file is"),
    ("--landlock", "Landlock is"),
    ("--landlock-rules", "Landlock is"),
    ("--log-format", "a choice of log format is"),
    ("--memory-zone", "memory zones are"),
    ("--numa", "NUMA nodes are"),
    ("--pci-segment", "further PCI segments are"),
    ("--platform", "platform settings are"),
    ("--pmem", "persistent memory is"),
    ("--pvpanic", "the panic device is"),
    ("--rate-limit-group", "rate limits are"),
    ("--restore", "restoring a snapshot is"),
    ("--seccomp", "system call filters are"),
    ("--tpm", "TPMs are"),
    ("--user-device", "vfio-user devices are"),
    ("--vsock", "vsock devices are"),
    ("--watchdog", "the watchdog is"),
];

const API: &str = "API and events";
const PROGRAM: &str = "The program";

/// Runs a virtual machine whose NICs are SR-IOV devices.
#[derive(Debug, Parser)]
#[command(name = "cloud-hypervisor", version = VERSION, after_help = EXAMPLE, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    vm: VmOptions,

    /// Unix socket of the REST API
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        help_heading = API,
        long_help = "Unix socket of the REST API: path=<path>, a path alone, or fd=<number> of a socket that listens already. \
                     Without a VM on the command line, it is made by the API's clients"
    )]
    api_socket: Option<String>,

    /// The VM, as the JSON of vm.create
    #[arg(
        long,
        value_name = "path",
        conflicts_with = "vm",
        help_heading = PROGRAM,
        long_help = "The VM, as the JSON of vm.create, or - for standard input. It is the whole VM: options that describe one are \
                     refused beside it. --print-config writes such a file"
    )]
    config: Option<PathBuf>,

    /// Where events are told
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        help_heading = API,
        long_help = "Where events are told, as JSON objects: path=<path> of a file, which is written anew, or of a named pipe, \
                     whose reader may come later; or fd=<number>, open already"
    )]
    event_monitor: Option<String>,

    /// Writes the log to this file in place of standard error
    #[arg(long, value_name = "path", help_heading = PROGRAM)]
    pub log_file: Option<PathBuf>,

    /// Goes on after the guest has switched itself off, until a client or a signal ends the program
    #[arg(long, help_heading = PROGRAM)]
    no_shutdown: bool,

    /// Prints the VM as JSON, with what was left out filled in, and does nothing else
    #[arg(
        long,
        help_heading = PROGRAM,
        long_help = "Prints the VM as the JSON of vm.create, with what was left out filled in, and does nothing else: nothing is \
                     opened but --config"
    )]
    pub print_config: bool,

    /// Logs more: -v tells what happens, -vv and -vvv how
    #[arg(short, action = ArgAction::Count, help_heading = PROGRAM)]
    pub verbose: u8,
}

/// The options do not make a whole.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(&'static str);

impl Cli {
    /// What the program is to do.
    ///
    /// # Errors
    ///
    /// The first value that cannot be read. Whether the values fit together is not looked at.
    pub fn into_options(self) -> Result<Options, Box<dyn Error>> {
        let api = self.api_socket.map(|text| text.parse()).transpose()?;
        let event_monitor = self.event_monitor.map(|text| text.parse()).transpose()?;
        let vm = match &self.config {
            Some(path) => Some(read_config(path)?),
            None if self.vm.is_given() => Some(self.vm.into_config()?),
            None => None,
        };
        if vm.is_none() && self.print_config {
            return Err(Usage("--print-config: no VM is described; give --kernel or --config").into());
        }
        if vm.is_none() && api.is_none() {
            return Err(Usage("there is nothing to run; give --kernel, --config or --api-socket").into());
        }
        Ok(Options { vm, api, event_monitor, no_shutdown: self.no_shutdown })
    }
}

/// The VM that a file describes.
fn read_config(path: &Path) -> Result<VmConfig, Box<dyn Error>> {
    let option = format!("--config {}", path.display());
    let text = if path == Path::new("-") { read_to_end(std::io::stdin()) } else { std::fs::read(path) };
    let text = text.map_err(|error| format!("{option}: cannot be read: {error}"))?;
    let config = VmConfig::from_json(&text);
    Ok(config
        .map_err(|ConfigError { subject, problem }| ConfigError { subject: format!("{option}: {subject}"), problem })?)
}

fn read_to_end(mut input: impl std::io::Read) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    input.read_to_end(&mut text)?;
    Ok(text)
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
    use std::collections::BTreeMap;

    use clap::CommandFactory;

    use super::*;

    fn line(arguments: &[&str]) -> Option<String> {
        report(&Cli::try_parse_from([&["cloud-hypervisor"], arguments].concat()).unwrap_err())
    }

    #[test]
    fn the_options_are_consistent_and_each_topic_is_sorted() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let mut topics = BTreeMap::<_, Vec<_>>::new();
        for argument in command.get_arguments() {
            let topic = argument.get_help_heading();
            assert!(topic.is_some() || ["help", "version"].contains(&argument.get_id().as_str()), "{argument}");
            topics.entry(topic).or_default().extend(argument.get_long());
        }
        assert!(topics.values().all(|options| options.is_sorted()), "{topics:?}");
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
        let config = Cli::try_parse_from(arguments).unwrap().vm.into_config().unwrap();
        let ids: Vec<_> = config.net.iter().filter_map(|net| net.id.as_deref()).collect();
        assert_eq!(ids, ["a", "b", "c"]);
        assert_eq!(config.net[0].vfs[0].index, 1);
    }
}
