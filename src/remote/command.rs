//! The command line of `ch-remote`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand};
use vm_api::body::Fault;
use vm_api::config::grammar::{self, PathOrFd};
use vm_api::config::{MemoryConfig, RestoreConfig, VfRange};
use vm_api::migration::{ReceiveMigration, SendMigration};

use super::add::Add;
use super::indices::Indices;
use super::vf_change::VfChange;
use crate::vm_options::{VmOptions, keys};

const EXAMPLE: &str = "\
Examples:

  export CH_API_SOCKET=/run/vm.sock
  ch-remote create vm.json
  ch-remote add-net id=pf0,tap=pf0,sriov_vfs=8 --vf index=0,tap=tenant-a
  ch-remote set-vf pf0 0-7 --spoofchk on
  ch-remote vfs --watch

Exit code:
  0  success
  1  the VMM refused, or cannot be reached
  2  the command line is malformed: an unknown option or key, or a malformed value";

/// Explanation of the columns, for help.
const COLUMNS: &str = "\
Columns:
  FLAGS  S spoof check, T trusted, I isolated from other VFs, M mirrored to another function
  RATE   guaranteed and highest rate in Mbit/s: 100-500M, 100M- without a limit, 500M without a guarantee
  RX TX  bits per second in the guest's directions; --json has frames, too
  DROPS  frames lost since the function was plugged in; the causes are below the table, the main one first";

/// Heading of the arguments that each subcommand has.
const CONNECTION: &str = "Connection and output";

/// Control a running cloud-hypervisor through its API.
#[derive(Debug, Parser)]
#[command(name = "ch-remote", version, after_help = EXAMPLE, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The API's Unix socket: a path, or path=<path>. By default that of the environment variable CH_API_SOCKET
    #[arg(long, global = true, value_name = "path", value_parser = socket, help_heading = CONNECTION)]
    pub api_socket: Option<PathBuf>,

    /// Print JSON. This is the default unless standard output is a terminal
    #[arg(long, global = true, conflicts_with = "text", help_heading = CONNECTION)]
    pub json: bool,

    /// Print text for people, even if standard output is not a terminal
    #[arg(long, global = true, help_heading = CONNECTION)]
    pub text: bool,

    /// Fail if an answer takes longer than this many seconds; 0 waits without limit. By default it waits while the VMM
    /// accepts other requests, which is checked every 20 seconds
    #[arg(long, global = true, value_name = "seconds", value_parser = number, help_heading = CONNECTION)]
    pub timeout: Option<u32>,

    #[command(subcommand)]
    pub command: Command,
}

/// Command to carry out.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Add(Add),
    /// Boot the VM
    Boot,
    /// End the running migration
    CancelMigration,
    /// Write the guest's memory to a file (not supported yet)
    Coredump(Destination),
    /// Show the counters of the devices (--text: those that are not 0), and explain them
    Counters {
        /// Explain the counter of this name, or all counters, instead of showing values
        #[arg(long, value_name = "counter", num_args = 0..=1, default_missing_value = "")]
        explain: Option<String>,
    },
    /// Create the VM
    Create {
        /// The VM as JSON, or - for standard input, the default if no option describes the VM
        #[arg(conflicts_with = "vm")]
        file: Option<PathBuf>,
        #[command(flatten)]
        vm: Box<VmOptions>,
    },
    /// Delete the VM
    Delete,
    /// Show the VM and its state
    Info,
    /// Make a function fail, for tests of its driver; the VMM must have been started to allow this
    InjectFault {
        /// Id of the device
        id: String,
        /// needs-reset, lose-interrupts, refuse-vf-enable or surprise-removal
        fault: Fault,
        /// Index of the VF, from 0; the device's own function, such as the PF, if left out
        #[arg(long, value_name = "index")]
        vf: Option<u16>,
        /// Number of interrupts to lose or of enables to refuse; 0 ends the fault [default: 1]
        #[arg(long, value_name = "number")]
        count: Option<u32>,
        /// MSI-X vector whose interrupts are lost; all if left out
        #[arg(long, value_name = "number")]
        vector: Option<u16>,
    },
    /// Print metrics in Prometheus' text format
    Metrics,
    /// Show the progress of the migration, or the result of the last one
    MigrationProgress,
    /// Send each vCPU a non-maskable interrupt
    Nmi,
    /// Pause the guest
    Pause,
    /// Check that the VMM responds
    Ping,
    /// Ask the guest to power off; one that does not listen runs on
    PowerButton,
    /// Reboot the guest
    Reboot,
    /// Receive a VM from another host, and wait until it has arrived
    ReceiveMigration {
        /// Address to listen on
        #[arg(
            value_name = "url|key=value,...",
            long_help = keys::<ReceiveMigration>(
                "Address to listen on: a URL, or keys. Descriptors of net_fds= and backends= are sent to the VMM"
            )
        )]
        config: String,
    },
    /// Ask the guest to release a device; info lists it until it is removed, at the latest by a reboot
    RemoveDevice {
        /// Id of the device
        id: String,
    },
    /// Change the number of vCPUs, the memory, or the size of the balloon
    #[command(group = ArgGroup::new("sizes").args(["cpus", "memory", "balloon"]).required(true).multiple(true))]
    Resize {
        /// Number of vCPUs
        #[arg(long, value_name = "number", value_parser = number)]
        cpus: Option<u32>,
        /// Size of the memory in bytes, or with a unit K, M or G
        #[arg(long, value_parser = bytes)]
        memory: Option<u64>,
        /// Size of the balloon in bytes, or with a unit K, M or G
        #[arg(long, value_parser = bytes)]
        balloon: Option<u64>,
    },
    /// Change the size of a disk
    ResizeDisk {
        /// Id of the disk
        #[arg(long)]
        disk: String,
        /// New size in bytes, or with a unit K, M or G
        #[arg(long, value_parser = bytes)]
        size: u64,
    },
    /// Change the size of a memory zone
    ResizeZone {
        /// Id of the memory zone
        #[arg(long)]
        id: String,
        /// New size in bytes, or with a unit K, M or G
        #[arg(long, value_parser = bytes)]
        size: u64,
    },
    /// Restore a VM from a snapshot
    Restore {
        /// Location of the snapshot, and the differences on this host
        #[arg(
            value_name = "key=value,...",
            long_help = keys::<RestoreConfig>(
                "Where the snapshot is, and what differs here, as for --restore of cloud-hypervisor. Descriptors of \
                 net_fds= and backends= are sent to the VMM"
            )
        )]
        restore: String,
    },
    /// Resume the guest
    Resume {
        /// Resume even if the target of a migration may be running the guest; make sure first that it is not
        #[arg(long)]
        force: bool,
    },
    /// Send the VM to another host
    SendMigration {
        /// Address of the target, and options
        #[arg(
            value_name = "url|key=value,...",
            long_help = keys::<SendMigration>("Address of the target: a URL, or keys")
        )]
        config: String,
        /// Wait until the target has the guest, and fail if it does not get it
        #[arg(long)]
        wait: bool,
    },
    /// Change a VF of a running VM
    SetVf {
        /// Id of the PF
        pf: String,
        /// Index of the VF, from 0, or several: a range such as 0-63, or '*' for all. Without one, only a backend can
        /// be given, to the PF or NIC itself
        index: Option<VfRange>,
        /// Settings to change
        #[command(flatten)]
        change: Box<VfChange>,
    },
    /// Power the VM off immediately
    Shutdown,
    /// End the VM and the VMM
    ShutdownVmm,
    /// Save the paused VM to a folder, as a snapshot
    Snapshot(Destination),
    /// Show PFs and VFs: address, state, MAC address, backend, link, rates and dropped frames
    #[command(after_help = COLUMNS)]
    Vfs {
        /// Id of the PF; all PFs if left out
        pf: Option<String>,
        /// Indices of its VFs, such as 3 or 0-7,12; all, and the PF itself, if left out
        indices: Option<Indices>,
        /// Repeat until interrupted
        #[arg(long)]
        watch: bool,
        /// Seconds over which rates are measured
        #[arg(long, value_name = "seconds", default_value = "1", value_parser = interval)]
        interval: u16,
    },
}

/// A destination.
#[derive(Debug, Args)]
pub(crate) struct Destination {
    /// Destination, such as file:///path
    pub url: String,
}

/// Parses the path of the API's socket, in the forms that cloud-hypervisor takes.
fn socket(text: &str) -> Result<PathBuf, String> {
    let is_path = text.split_once('=').map_or(!text.is_empty(), |(key, _)| key.contains('/'));
    match grammar::path_or_fd(text) {
        _ if is_path => Ok(text.into()),
        Some(PathOrFd::Path(path)) => Ok(path),
        _ => Err("give a path, or path=<path>".to_string()),
    }
}

/// The path in the environment variable `CH_API_SOCKET`, if it is set.
///
/// # Errors
///
/// Fails with the fault of its value.
pub(crate) fn socket_of_environment() -> Result<Option<PathBuf>, String> {
    let Some(value) = std::env::var_os("CH_API_SOCKET").filter(|value| !value.is_empty()) else { return Ok(None) };
    match value.to_str() {
        Some(text) => socket(text).map(Some).map_err(|what| format!("CH_API_SOCKET={text}: {what}")),
        None => Ok(Some(value.into())),
    }
}

/// Parses a whole number.
fn number(text: &str) -> Result<u32, String> {
    let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| format!("give a whole number from 0 to {}", u32::MAX))
}

/// Parses a number of seconds between readings.
fn interval(text: &str) -> Result<u16, String> {
    let seconds = number(text).ok().and_then(|number| u16::try_from(number).ok()).filter(|seconds| *seconds > 0);
    seconds.ok_or_else(|| format!("give a whole number from 1 to {}", u16::MAX))
}

/// Parses a number of bytes by the grammar of the configuration.
fn bytes(text: &str) -> Result<u64, String> {
    let is_one_value = text.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !text.is_empty();
    let size = || format!("size={text}").parse::<MemoryConfig>().ok().map(|memory| memory.size);
    let size = if is_one_value { size() } else { None };
    size.ok_or_else(|| "give a number of bytes, with or without a unit K, M or G, such as 512M".to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;
    use vm_api::config::unsupported;

    use super::*;

    #[test]
    fn the_commands_are_consistent_and_sorted() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
        assert!(names.is_sorted(), "{names:?}");
    }

    #[test]
    fn an_unsupported_command_is_refused_with_the_reason() {
        let command = Cli::command();
        let later = command.get_subcommands().filter(|command| {
            command.get_about().is_some_and(|about| about.to_string().ends_with("(not supported yet)"))
        });
        let later: BTreeSet<_> = later.map(|command| format!("vm.{}", command.get_name())).collect();
        assert_eq!(later, unsupported::endpoints().map(str::to_string).collect());
    }

    #[test]
    fn a_socket_is_named_as_for_the_vmm_before_or_after() {
        for text in ["/run/vm=1.sock", "vm.sock", "path=/run/vm.sock"] {
            let expected = text.trim_start_matches("path=");
            for arguments in [["--api-socket", text, "ping"], ["ping", "--api-socket", text]] {
                let cli = Cli::try_parse_from([&["ch-remote"], &arguments[..]].concat()).unwrap();
                assert_eq!(cli.api_socket, Some(PathBuf::from(expected)));
            }
        }
        for wrong in ["", "path=", "fd=7", "port=80"] {
            assert_eq!(socket(wrong), Err("give a path, or path=<path>".to_string()), "{wrong}");
        }
    }

    #[test]
    fn a_size_is_one_number_of_bytes() {
        assert_eq!(bytes("2G"), Ok(2 << 30));
        assert_eq!(bytes("4096"), Ok(4096));
        for wrong in ["", "G", "-1", "1T", "1,shared=on", "1 G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
