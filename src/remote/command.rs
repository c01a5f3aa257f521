//! The command line of `ch-remote`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vmm::config::{DiskConfig, MacAddress, MemoryConfig, NetConfig, VdpaConfig, VfConfig};

use crate::vm_options::{VmOptions, keys};

const EXAMPLE: &str = "\
Examples:

  ch-remote --api-socket /run/vm.sock create vm.json
  ch-remote --api-socket /run/vm.sock add-net id=pf0,tap=pf0,sriov_vfs=8 --vf index=0,tap=tenant-a
  ch-remote --api-socket /run/vm.sock vfs --watch

Exit code:
  0  it is done
  1  the VMM refused, or cannot be reached
  2  the command line cannot be read";

/// Controls a running cloud-hypervisor through its API.
#[derive(Debug, Parser)]
#[command(name = "ch-remote", version, after_help = EXAMPLE, arg_required_else_help = true)]
pub struct Cli {
    /// The API's Unix socket
    #[arg(long, value_name = "path")]
    pub api_socket: PathBuf,

    /// Prints answers as JSON, which is what they are for programs anyway: when no terminal takes them
    #[arg(long, global = true, conflicts_with = "text")]
    pub json: bool,

    /// Prints answers for people, also when no terminal takes them
    #[arg(long, global = true)]
    pub text: bool,

    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Adds a VFIO device
    AddDevice(Unknown),
    /// Adds a disk
    AddDisk {
        /// The disk
        #[arg(value_name = "key=value,...", long_help = keys::<DiskConfig>("The disk, as --disk of cloud-hypervisor"))]
        disk: String,
    },
    /// Adds a shared file system
    AddFs(Unknown),
    /// Adds a vhost-user device
    AddGenericVhostUser(Unknown),
    /// Adds a NIC, with its VFs
    AddNet {
        /// The NIC
        #[arg(
            value_name = "key=value,...",
            long_help = keys::<NetConfig>("The NIC, as --net of cloud-hypervisor. Descriptors of fd= are passed on")
        )]
        net: String,
        /// A VF that is not as its NIC makes it; may be repeated
        #[arg(long, value_name = "key=value,...", long_help = keys::<VfConfig>("A VF that is not as its NIC makes it. Repeat for more"))]
        vf: Vec<String>,
    },
    /// Adds persistent memory
    AddPmem(Unknown),
    /// Adds a vfio-user device
    AddUserDevice(Unknown),
    /// Adds a vDPA device
    AddVdpa {
        /// The device
        #[arg(value_name = "key=value,...", long_help = keys::<VdpaConfig>("The device, as --vdpa of cloud-hypervisor"))]
        vdpa: String,
    },
    /// Adds a vsock device
    AddVsock(Unknown),
    /// Boots the VM
    Boot,
    /// Writes the guest's memory to a file
    Coredump(Destination),
    /// Shows what the devices have counted
    Counters,
    /// Creates the VM
    Create {
        /// The JSON of the VM; - for standard input, which it is if no option describes the VM either
        #[arg(conflicts_with = "vm")]
        file: Option<PathBuf>,
        #[command(flatten)]
        vm: Box<VmOptions>,
    },
    /// Deletes the VM
    Delete,
    /// Shows the VM
    Info,
    /// Prints metrics in Prometheus' text form
    Metrics,
    /// Gives each vCPU a non-maskable interrupt
    Nmi,
    /// Stops the guest where it is
    Pause,
    /// Asks whether the VMM is there
    Ping,
    /// Asks the guest to switch itself off
    PowerButton,
    /// Starts the guest again
    Reboot,
    /// Receives a VM that another host sends
    ReceiveMigration(Unknown),
    /// Removes a device
    RemoveDevice {
        /// Its id
        id: String,
    },
    /// Changes how many vCPUs and how much memory the guest has
    Resize {
        /// Number of vCPUs
        #[arg(long)]
        cpus: Option<u32>,
        /// Memory in bytes, or with K, M or G
        #[arg(long, value_parser = bytes)]
        memory: Option<u64>,
        /// Memory that the guest gives back, in bytes, or with K, M or G
        #[arg(long, value_parser = bytes)]
        balloon: Option<u64>,
    },
    /// Changes the size of a disk
    ResizeDisk {
        /// Its id
        #[arg(long)]
        disk: String,
        /// Its size in bytes, or with K, M or G
        #[arg(long, value_parser = bytes)]
        size: u64,
    },
    /// Changes the size of a zone of memory
    ResizeZone {
        /// Its id
        #[arg(long)]
        id: String,
        /// Its size in bytes, or with K, M or G
        #[arg(long, value_parser = bytes)]
        size: u64,
    },
    /// Makes a VM of a snapshot
    Restore(Unknown),
    /// Lets the guest go on
    Resume,
    /// Sends the VM to another host
    SendMigration(Unknown),
    /// Changes a VF of a running VM
    SetVf {
        /// The id of its PF
        pf: String,
        /// Its index, from 0
        index: u16,
        /// Whether it has a link
        #[arg(long, required_unless_present = "mac")]
        link: Option<LinkState>,
        /// Its MAC address
        #[arg(long)]
        mac: Option<MacAddress>,
    },
    /// Switches the VM off at once
    Shutdown,
    /// Ends the VM and the VMM
    ShutdownVmm,
    /// Takes a snapshot
    Snapshot(Destination),
    /// Shows the PFs and VFs: address, state, MAC address, backend, link, rates
    Vfs {
        /// Shows them again and again
        #[arg(long)]
        watch: bool,
        /// Seconds between two looks, from which rates are told
        #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
        interval: u16,
    },
}

/// The text of an endpoint that there is not yet.
#[derive(Debug, Args)]
pub struct Unknown {
    /// What to add or do, as Cloud Hypervisor's ch-remote takes it
    #[arg(value_name = "key=value,...")]
    pub config: String,
}

/// Where something goes.
#[derive(Debug, Args)]
pub struct Destination {
    /// Where to, as file:///path
    pub url: String,
}

/// Whether a VF has a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    /// It has
    Up,
    /// It has none
    Down,
}

/// A number of bytes, by the grammar of the configuration.
fn bytes(text: &str) -> Result<u64, String> {
    let is_one_value = text.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !text.is_empty();
    let size = || format!("size={text}").parse::<MemoryConfig>().ok().map(|memory| memory.size);
    let size = if is_one_value { size() } else { None };
    size.ok_or_else(|| "give a number of bytes, or one with K, M or G, as 512M".to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_commands_are_consistent_and_sorted() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
        assert!(names.is_sorted(), "{names:?}");
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
