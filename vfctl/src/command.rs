//! The command line of `vfctl`, for parsing, help, completions and man pages.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Parser, Subcommand};

/// Examples and exit codes, for help.
const EXAMPLE: &str = "\
Names:
  A VF is a PCI address (0000:00:03.1, 00:03.1), a network interface (eth1), or PF/INDEX (eth0/0, 00:03.0/0).
  A PF is a PCI address or a network interface.

Example:
  vfctl list
  vfctl set eth0/0 vlan=120 max_tx_rate=200
  vfctl reset eth0/0

Exit code:
  0  success
  1  the host refused, which changed nothing, or there is no such function
  2  the command line is malformed
  3  this guest has no channel: its host gives it one with --net guest_control=
  4  no permission: run it as root
  5  another program uses the channel
  6  the host did not answer; a change may have been made";

/// Settings of `set`, for help.
const SETTINGS: &str = "\
Settings:
  vlan=NUMBER         port VLAN, 1 to 4094; 0 returns to the host's
  vlan_qos=NUMBER     priority in the tag of vlan, 0 to 7
  vlan_proto=WORD     tag protocol of vlan: 802.1q or 802.1ad
  mac=ADDRESS         MAC address; set it on the network interface, too
  max_tx_rate=NUMBER  transmit limit in Mbit/s; 0 returns to the host's
  link=WORD           auto, up or down
  spoofchk=on|off     drop packets from other MAC addresses than the VF's own

Settings that are left out stay. Either all settings are made, or none. They end with a reboot, when the VF is disabled,
and by reset. vfctl list shows which of them the host allows.";

/// Columns of `list`, for help.
const COLUMNS: &str = "\
Columns:
  NETDEV    network interface, if this network namespace has it
  VLAN      port VLAN, with its priority if that is not 0: 120/3
  RATE      transmit limit in Mbit/s
  LINK      setting and state: auto/up
  SET       settings that the guest made; all others are the host's
  -         none";

/// Heading of the arguments that each subcommand has.
const COMMON: &str = "Channel and output";

/// Govern the VFs of this guest, within the limits that its host has set.
#[derive(Debug, Parser)]
#[command(name = "vfctl", version, after_help = EXAMPLE, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// Print JSON, also to a terminal
    #[arg(long, global = true, help_heading = COMMON)]
    pub json: bool,
    /// Print tables, also to a pipe or file
    #[arg(long, global = true, conflicts_with = "json", help_heading = COMMON)]
    pub text: bool,
    /// Time limit for other programs to close the channel, and for each answer of the host
    #[arg(long, global = true, value_name = "seconds", default_value = "10", value_parser = seconds,
          help_heading = COMMON)]
    pub timeout: Duration,
    /// Folder that has the guest's /sys, /dev and /run, as in a container that mounts them
    #[arg(long, global = true, value_name = "folder", default_value = "/", help_heading = COMMON)]
    pub root: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the VFs, and the settings that the host allows
    #[command(after_help = COLUMNS)]
    List {
        /// The PF [default: all]
        pf: Option<String>,
    },
    /// Show a VF with its counters
    Show {
        /// The VF
        vf: String,
    },
    /// Change settings of a VF, and show the VF after that
    #[command(after_help = SETTINGS)]
    Set {
        /// The VF
        vf: String,
        /// The settings
        #[arg(required = true, value_name = "SETTING=VALUE")]
        settings: Vec<String>,
    },
    /// Return VFs to the settings of the host
    #[command(group = ArgGroup::new("which").args(["vf", "all"]).required(true))]
    Reset {
        /// The VF
        vf: Option<String>,
        /// All VFs that have settings of the guest
        #[arg(long)]
        all: bool,
    },
    /// Print changes of VFs by the host or the guest, until it is interrupted
    Watch,
}

/// Parses a time limit.
fn seconds(text: &str) -> Result<Duration, String> {
    let limit = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let is_usable = |limit: &Duration| !limit.is_zero() && *limit <= Duration::from_secs(3600);
    limit.filter(is_usable).ok_or_else(|| "not a number above 0, and at most 3600".to_string())
}
