//! The command line: its options, and the error if it cannot be parsed.

use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Parser, ValueEnum};
use vmm::Options;
use vmm::config::{ConfigError, PlannedVm, RestoreConfig, VmConfig, unsupported};

use crate::error::CommandError;
use crate::log_format::Format;
use crate::usage;
use crate::vm_options::{VmOptions, keys};

/// Starts with the compatible version of Cloud Hypervisor, which management programs parse.
const VERSION: &str = concat!(
    "v53.0.0\nSR-IOV emulation ",
    env!("CARGO_PKG_VERSION"),
    "; compatible with the command line of Cloud Hypervisor v53, but not a fork of it"
);

const EXAMPLE: &str = "\
Example: a guest with a NIC that has 8 virtual functions (VFs), the first of them on the tap tenant-a

  cloud-hypervisor --kernel vmlinuz --initramfs initrd --cmdline console=ttyS0 \\
    --serial tty --console off --cpus boot=2 --memory size=1G \\
    --net id=pf0,tap=pf0,sriov_vfs=8 --net-vf pf=pf0,index=0,tap=tenant-a

Exit code:
  0  the guest powered off, or a signal ended the VM
  1  a problem with the configuration, the host or the guest, named in one line on standard error
  2  the command line cannot be parsed: an unknown option or key, or a malformed value";

const API: &str = "API and events";
const PROGRAM: &str = "Process";

/// Run a virtual machine whose NICs can be SR-IOV devices
#[derive(Debug, Parser)]
#[command(name = "cloud-hypervisor", version = VERSION, after_help = EXAMPLE, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    vm: VmOptions,

    /// Unix socket of the REST API
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        help_heading = API,
        long_help = "Unix socket of the REST API: path=<path>, a path alone, or fd=<number>, a socket that is \
                     already listening. If the command line describes no VM, a client creates it"
    )]
    api_socket: Option<String>,

    /// Read the VM from a JSON file
    #[arg(
        long,
        value_name = "path",
        conflicts_with = "vm",
        help_heading = PROGRAM,
        long_help = "Read the VM's description, the JSON of vm.create, from a file or from standard input (-). \
                     It cannot be combined with options that describe a VM. --print-config prints such a file"
    )]
    config: Option<PathBuf>,

    /// Write events to a file, pipe or descriptor
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        help_heading = API,
        long_help = "Write events as JSON objects to path=<path>, a file (which is appended to) or a named pipe \
                     (whose reader may come later), or to fd=<number>, an open file descriptor"
    )]
    event_monitor: Option<String>,

    /// Accept faults on demand (vm.inject-fault), for tests of drivers
    #[arg(
        long,
        help_heading = PROGRAM,
        long_help = "Accept vm.inject-fault (ch-remote inject-fault), which makes a function fail, for tests of its \
                     driver. Without this option it is refused"
    )]
    fault_injection: bool,

    /// Append the log to this file instead of standard error
    #[arg(
        long,
        value_name = "path",
        help_heading = PROGRAM,
        long_help = "Append the log to this file instead of standard error. SIGHUP opens it again, and the file of \
                     --event-monitor, after logrotate has renamed them"
    )]
    pub log_file: Option<PathBuf>,

    /// Format of the log's lines
    #[arg(
        long,
        value_name = "format",
        help_heading = PROGRAM,
        long_help = "Format of the log's lines: text with tokens in braces, such as \"{wallclock} {level} {msg}\". \
                     Two braces are one.\n\n\
                     {boottime}  seconds since the start\n\
                     {wallclock} date and time in UTC\n\
                     {glog}      month, day and time, as the library glog writes them\n\
                     {thread}    name of the thread\n\
                     {level}     ERROR, WARN, INFO, DEBUG or TRACE; {levelchar} is its first letter\n\
                     {location}  file and line of the message\n\
                     {msg}       the message\n\
                     {pid}, {tid}  number of the process and of the thread\n\
                     {year}, {month}, {day}, {hour}, {minute}, {second}, {micros}, {offset}  \
                     parts of the time in UTC\n\n\
                     {localglog}, {localyear} and so on are in local time"
    )]
    pub log_format: Option<Format>,

    /// Keep running after the guest powers off, until a client or a signal ends the program
    #[arg(long, help_heading = PROGRAM)]
    no_shutdown: bool,

    /// Print the VM as JSON with all defaults filled in, and exit
    #[arg(
        long,
        help_heading = PROGRAM,
        long_help = "Print the VM as the JSON of vm.create, with all defaults filled in, and exit. No file is opened \
                     except the one given to --config"
    )]
    pub print_config: bool,

    /// Unix socket for readers: metrics and information, no changes
    #[arg(
        long,
        value_name = "path=<path>|fd=<number>",
        help_heading = API,
        long_help = "Unix socket for readers, in the forms of --api-socket. It answers GET requests, such as those \
                     for /metrics, vm.info and vm.counters, and refuses changes with status 403. vm.info leaves out \
                     the kernel's command line and oem_strings"
    )]
    read_only_socket: Option<String>,

    /// Restore the VM from a snapshot
    #[arg(
        long,
        value_name = "key=value,...",
        conflicts_with_all = ["vm", "config"],
        help_heading = PROGRAM,
        long_help = keys::<RestoreConfig>(
            "Restore the VM from a snapshot (vm.snapshot). It stays paused until vm.resume, unless resume=on is given"
        )
    )]
    restore: Option<String>,

    /// Action on a disallowed system call [default: true]
    #[arg(
        long,
        value_name = "true|false|log|errno",
        help_heading = PROGRAM,
        hide_possible_values = true,
        long_help = "Action on a system call that the thread should not make. true, the default, ends the \
                     program with a line that names the thread and the call; errno: the call fails with EPERM; log: it \
                     is made, and audited by the kernel; false runs without filters"
    )]
    seccomp: Option<Seccomp>,

    /// Log more: -v changes and events, -vv refused writes and details, -vvv everything
    #[arg(
        short,
        action = ArgAction::Count,
        help_heading = PROGRAM,
        long_help = "Log more. -v: requests that change something, with their outcome, and events: starts and stops of \
                     the VM, VFs enabled, disabled and reset, migrations. -vv: also actions of drivers, and refused \
                     writes with the reason. -vvv: everything"
    )]
    pub verbose: u8,
}

/// Action on a disallowed system call, as an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Seccomp {
    True,
    False,
    Log,
    Errno,
}

impl From<Seccomp> for vmm::Seccomp {
    fn from(text: Seccomp) -> Self {
        match text {
            Seccomp::True => Self::True,
            Seccomp::False => Self::False,
            Seccomp::Log => Self::Log,
            Seccomp::Errno => Self::Errno,
        }
    }
}

impl Cli {
    /// The command described by the arguments.
    ///
    /// # Errors
    ///
    /// Fails with the first value that is invalid or not allowed. Nothing has been opened or created then.
    pub(crate) fn into_options(self) -> Result<Options, CommandError> {
        let api = self.api_socket.map(|text| text.parse()).transpose().map_err(vmm::Error::from)?;
        let readers = self.read_only_socket.map(|text| text.parse()).transpose().map_err(vmm::Error::ReadOnly)?;
        let event_monitor = self.event_monitor.map(|text| text.parse()).transpose().map_err(vmm::Error::from)?;
        let vm = match &self.config {
            Some(path) => Some(read_config(path)?),
            None if self.vm.is_given() => Some(self.vm.into_config().map_err(vmm::Error::from)?),
            None => None,
        };
        let restore = self.restore.as_deref().map(str::parse).transpose().map_err(vmm::Error::from)?;
        if vm.is_none() && self.print_config {
            return Err(CommandError::Usage("--print-config: no VM is described; give --kernel or --config"));
        }
        if vm.is_none() && restore.is_none() && api.is_none() {
            return Err(CommandError::Usage("nothing to run; give --kernel, --config, --restore or --api-socket"));
        }
        let vm = match (vm, &self.config) {
            (Some(vm), Some(path)) => Some(PlannedVm::of_document(vm).map_err(|error| in_file(path, error))),
            (vm, _) => vm.map(PlannedVm::new),
        };
        let vm = vm.transpose().map_err(vmm::Error::from)?;
        let seccomp = self.seccomp.unwrap_or(Seccomp::True).into();
        let (no_shutdown, fault_injection) = (self.no_shutdown, self.fault_injection);
        Ok(Options { vm, restore, api, readers, event_monitor, no_shutdown, fault_injection, seccomp, log: None })
    }
}

/// Reads the VM from a file.
fn read_config(path: &Path) -> Result<VmConfig, CommandError> {
    let text = if path == Path::new("-") { read_to_end(std::io::stdin()) } else { std::fs::read(path) };
    let text = text.map_err(|error| CommandError::ConfigFile { path: path.to_owned(), error })?;
    Ok(VmConfig::from_json(&text).map_err(|error| in_file(path, error)).map_err(vmm::Error::from)?)
}

/// Adds the file at `path` to an error of its VM.
fn in_file(path: &Path, error: ConfigError) -> ConfigError {
    ConfigError { subject: format!("--config {}: {}", path.display(), error.subject), ..error }
}

fn read_to_end(mut input: impl std::io::Read) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    input.read_to_end(&mut text)?;
    Ok(text)
}

/// The error of an invalid command line, in one line; `None` if it requests help or the version. `given` are the
/// arguments of the command line.
pub(crate) fn report(error: &clap::Error, given: &[String]) -> Option<String> {
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && let Some(what) = unsupported::flag(option)
    {
        return Some(format!("{option}: {what} not supported yet; leave it out"));
    }
    usage::line(error, given)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::CommandFactory;

    use super::*;
    use crate::vm_options::FIRST;

    fn line(arguments: &[&str]) -> Option<String> {
        let given: Vec<_> = arguments.iter().map(ToString::to_string).collect();
        report(&Cli::try_parse_from([&["cloud-hypervisor"], arguments].concat()).unwrap_err(), &given)
    }

    #[test]
    fn each_topic_has_the_most_used_options_first_and_others_sorted() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let mut topics = BTreeMap::<_, Vec<_>>::new();
        for argument in command.get_arguments() {
            let topic = argument.get_help_heading();
            assert!(topic.is_some() || ["help", "version"].contains(&argument.get_id().as_str()), "{argument}");
            topics.entry(topic).or_default().extend(argument.get_long());
        }
        let mut used = Vec::new();
        for options in topics.values_mut() {
            used.extend(options.extract_if(.., |option| FIRST.contains(option)));
            assert!(options.is_sorted(), "{options:?}");
        }
        used.sort_by_key(|option| FIRST.iter().position(|first| first == option));
        assert_eq!(used, FIRST);
        let help = Cli::command().render_long_help().to_string();
        let lines: Vec<_> = help.lines().map(str::trim_start).collect();
        let place = |start: &str| lines.iter().position(|line| line.starts_with(start)).unwrap();
        let order = ["--kernel <", "--cmdline <", "--cpus <", "--memory <", "--disk <", "--net <", "--balloon <"];
        assert!(order.map(place).is_sorted(), "{help}");
        let net = place("--net <");
        let keys = ["id=", "tap=", "mac=", "sriov_vfs=", "switch=", "ip="];
        let place = |key: &str| net + lines[net..].iter().position(|line| line.starts_with(key)).unwrap();
        assert!(keys.map(place).is_sorted(), "{help}");
    }

    /// The example is copied to a shell: each line but the last ends with a backslash, and none is wrapped.
    #[test]
    fn the_example_of_the_help_can_be_copied() {
        let help = Cli::command().term_width(80).render_long_help().to_string();
        let lines = help.lines().skip_while(|line| !line.starts_with("  cloud-hypervisor --kernel"));
        let example: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        assert_eq!(example.len(), 3, "{example:?}");
        assert!(example[..2].iter().all(|line| line.ends_with('\\')) && !example[2].ends_with('\\'), "{example:?}");
        let words = example.join(" ").replace('\\', " ");
        let cli = Cli::try_parse_from(words.split_whitespace()).unwrap();
        assert_eq!(cli.vm.into_config().unwrap().net[0].vfs.len(), 1);
    }

    #[test]
    fn an_option_is_here_or_comes_later() {
        let command = Cli::command();
        let options: Vec<_> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        assert!(unsupported::flags().all(|option| !options.contains(&option.trim_start_matches('-'))));
    }

    #[test]
    fn every_option_of_a_later_version_is_refused_by_name() {
        for option in unsupported::flags() {
            let what = unsupported::flag(option).unwrap();
            let expected = format!("{option}: {what} not supported yet; leave it out");
            assert_eq!(line(&["--kernel", "k", option]), Some(expected.clone()));
            assert_eq!(line(&[&format!("{option}=x")]), Some(expected));
        }
    }

    #[test]
    fn a_wrong_command_line_is_reported_in_one_line() {
        assert_eq!(line(&[]), None);
        assert_eq!(
            line(&["--serial", "tty"]).unwrap(),
            "the following required arguments were not provided: <--kernel <path>|--firmware <path>>; see --help"
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
    fn only_given_options_are_named_as_a_conflict() {
        let conflict = |arguments: &[&str], both: [&str; 2]| {
            let line = line(arguments).unwrap();
            let [one, other] = both;
            let said = |one, other| format!("{one} cannot be combined with {other}; leave one of them out; see --help");
            assert!(line == said(one, other) || line == said(other, one), "{line}");
        };
        conflict(&["--restore", "x", "--kernel", "y"], ["--restore", "--kernel"]);
        conflict(&["--config", "x", "--kernel", "k", "--net=y"], ["--config", "--kernel, --net"]);
        conflict(&["--config", "x", "--restore", "y"], ["--config", "--restore"]);
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
