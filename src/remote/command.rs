//! The command line of `ch-remote`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use vm_api::config::{MemoryConfig, RestoreConfig};
use vm_api::migration::{ReceiveMigration, SendMigration};

use super::add::Add;
use super::vf_change::VfChange;
use super::vf_table::{COLUMNS, Indices};
use crate::vm_options::{VmOptions, keys};

const EXAMPLE: &str = "\
Examples:

  ch-remote --api-socket /run/vm.sock create vm.json
  ch-remote --api-socket /run/vm.sock add-net id=pf0,tap=pf0,sriov_vfs=8 --vf index=0,tap=tenant-a
  ch-remote --api-socket /run/vm.sock vfs --watch

Exit code:
  0  success
  1  the VMM refused, or cannot be reached
  2  the command line is malformed";

/// Control a running cloud-hypervisor through its API.
#[derive(Debug, Parser)]
#[command(name = "ch-remote", version, after_help = EXAMPLE, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The API's Unix socket
    #[arg(long, value_name = "path")]
    pub api_socket: PathBuf,

    /// Print JSON. This is the default unless standard output is a terminal
    #[arg(long, global = true, conflicts_with = "text")]
    pub json: bool,

    /// Print text for people, even if standard output is not a terminal
    #[arg(long, global = true)]
    pub text: bool,

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
    /// Show the counters of the devices that are not 0, and explain them
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
    /// Ask the guest to power off
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
    /// Remove a device
    RemoveDevice {
        /// Id of the device
        id: String,
    },
    /// Change the number of vCPUs, the memory, or the size of the balloon
    Resize {
        /// Number of vCPUs
        #[arg(long)]
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
        #[arg(value_name = "key=value,...", long_help = keys::<SendMigration>("Address of the target, and options"))]
        config: String,
    },
    /// Change a VF of a running VM
    SetVf {
        /// Id of the PF
        pf: String,
        /// Index of the VF, from 0. Without one, only a backend can be given, to the PF or NIC itself
        index: Option<u16>,
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
        #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
        interval: u16,
    },
}

/// A destination.
#[derive(Debug, Args)]
pub(crate) struct Destination {
    /// Destination, such as file:///path
    pub url: String,
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
    fn what_the_vmm_does_not_support_yet_says_so() {
        let command = Cli::command();
        let later = command.get_subcommands().filter(|command| {
            command.get_about().is_some_and(|about| about.to_string().ends_with("(not supported yet)"))
        });
        let later: BTreeSet<_> = later.map(|command| format!("vm.{}", command.get_name())).collect();
        assert_eq!(later, unsupported::endpoints().map(str::to_string).collect());
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
