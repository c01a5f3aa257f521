//! The options that describe a virtual machine, shared by cloud-hypervisor and ch-remote.

use std::path::PathBuf;

use clap::{ArgAction, ArgGroup, Args};
use vm_api::config::{
    BalloonConfig, ConfigError, ConsoleConfig, CpusConfig, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig,
    LandlockConfig, MemoryConfig, MemoryZoneConfig, NetConfig, NetVf, NumaConfig, Options, PayloadConfig,
    PciSegmentConfig, PlatformConfig, PmemConfig, Problem, RateLimitGroupConfig, RngConfig, RtcConfig, TpmConfig,
    VdpaConfig, VmConfig, VsockConfig, help,
};

const CONSOLE_MODES: &str = "off, null, tty, pty, file=<path> or socket=<path>";

const BOOT: &str = "Boot";
const MACHINE: &str = "Machine";
const DEVICES: &str = "Devices";

/// A virtual machine.
#[derive(Debug, Default, Args)]
#[group(id = "vm", multiple = true)]
#[command(group = ArgGroup::new("payload").multiple(true))]
pub(crate) struct VmOptions {
    /// Balloon
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<BalloonConfig>("Balloon: returns guest memory to the host")
    )]
    balloon: Option<String>,

    /// Kernel command line
    #[arg(long, value_name = "text", requires = "payload", help_heading = BOOT)]
    cmdline: Option<String>,

    /// Virtio console
    #[arg(
        long,
        value_name = "mode",
        requires = "payload",
        help_heading = DEVICES,
        long_help = format!(
            "Virtio console (hvc0 in the guest): {CONSOLE_MODES} [default: tty]\n\nKeys of the device may follow: \
             id=<name> [default: __console], pci_segment=<number>, pci_device_id=<number>"
        )
    )]
    console: Option<String>,

    /// Virtual CPUs
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<CpusConfig>("Virtual CPUs")
    )]
    cpus: Option<String>,

    /// Debug console: I/O port for firmware log output
    #[arg(
        long,
        value_name = "mode[,iobase=<port>]",
        requires = "payload",
        help_heading = DEVICES,
        long_help = "Debug console, an I/O port for firmware log output: off, null, tty, pty or \
                     file=<path>, with or without iobase=<port> [default: off,iobase=0xe9]"
    )]
    debug_console: Option<String>,

    /// Devices of the host
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<DeviceConfig>("PCI devices of the host that the guest has (VFIO). Repeat for more")
    )]
    device: Vec<String>,

    /// Disks
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<DiskConfig>("Disks. Repeat for more")
    )]
    disk: Vec<String>,

    /// Firmware that boots from a disk, instead of a kernel: an ELF file with a PVH entry, such as CLOUDHV.fd or
    /// hypervisor-fw
    #[arg(long, value_name = "path", group = "payload", help_heading = BOOT)]
    firmware: Option<PathBuf>,

    /// Shared file systems
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<FsConfig>(
            "Folders of the host that the guest mounts, over a vhost-user backend such as virtiofsd. Repeat for more"
        )
    )]
    fs: Vec<String>,

    /// vhost-user devices of any type
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<GenericVhostUserConfig>("vhost-user devices of any type. Repeat for more")
    )]
    generic_vhost_user: Vec<String>,

    /// Initial RAM file system
    #[arg(long, value_name = "path", requires = "payload", help_heading = BOOT)]
    initramfs: Option<PathBuf>,

    /// Kernel: a bzImage, or a vmlinux with a PVH entry
    #[arg(long, value_name = "path", group = "payload", help_heading = BOOT)]
    kernel: Option<PathBuf>,

    /// Confine the program to the files that the VM's options name
    #[arg(
        long,
        requires = "payload",
        help_heading = MACHINE,
        long_help = "Have Landlock keep this program from all files of the host but those that the VM's options name, \
                     and from TCP. The files must exist"
    )]
    landlock: bool,

    /// Further files that the program may use with --landlock
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "landlock",
        help_heading = MACHINE,
        long_help = keys::<LandlockConfig>(
            "Further files that the program may use with --landlock, such as those of devices that are added later. \
             Repeat for more"
        )
    )]
    landlock_rules: Vec<String>,

    /// Guest memory
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<MemoryConfig>("Guest memory")
    )]
    memory: Option<String>,

    /// Parts of the guest memory with their own properties
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<MemoryZoneConfig>(
            "Parts of the guest memory with properties of their own, with --memory size=0. Repeat for more"
        )
    )]
    memory_zone: Vec<String>,

    /// NICs. One with sriov_vfs is an SR-IOV physical function (PF)
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<NetConfig>("NICs. One with sriov_vfs is an SR-IOV physical function (PF). Repeat for more")
    )]
    net: Vec<String>,

    /// Per-VF overrides of the PF's defaults
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<NetVf>("Per-VF overrides of the PF's defaults. Repeat for more")
    )]
    net_vf: Vec<String>,

    /// NUMA nodes of the guest
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<NumaConfig>("NUMA nodes of the guest. Repeat for more")
    )]
    numa: Vec<String>,

    /// Weight of each PCI segment's share of the address space for PCI memory
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<PciSegmentConfig>(
            "Weight of each PCI segment's share of the address space for PCI memory. Repeat for more"
        )
    )]
    pci_segment: Vec<String>,

    /// The machine as a whole
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = MACHINE,
        long_help = keys::<PlatformConfig>("The machine as a whole")
    )]
    platform: Option<String>,

    /// Persistent memory
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<PmemConfig>("Files that the guest has as persistent memory. Repeat for more")
    )]
    pmem: Vec<String>,

    /// pvpanic: reports guest panics as events
    #[arg(long, requires = "payload", help_heading = DEVICES)]
    pvpanic: bool,

    /// Rate limits that several disks share
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<RateLimitGroupConfig>("Rate limits that several disks share. Repeat for more")
    )]
    rate_limit_group: Vec<String>,

    /// Entropy device
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<RngConfig>("Entropy device. Every VM has one")
    )]
    rng: Option<String>,

    /// Clock with the host's time
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 0..=1,
        default_missing_value = "",
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<RtcConfig>("Virtio clock, which has the host's UTC. Without keys, one with their defaults")
    )]
    rtc: Option<String>,

    /// Serial port
    #[arg(
        long,
        value_name = "mode",
        requires = "payload",
        help_heading = DEVICES,
        long_help = format!("Serial port: {CONSOLE_MODES} [default: null]")
    )]
    serial: Option<String>,

    /// TPM 2.0, backed by swtpm
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<TpmConfig>("TPM 2.0, backed by swtpm")
    )]
    tpm: Option<String>,

    /// NICs that are vDPA devices of the host
    #[arg(
        long,
        value_name = "key=value,...",
        num_args = 1..,
        action = ArgAction::Append,
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<VdpaConfig>(
            "NICs that are vDPA devices of the host. --net with vdpa= has more keys. Repeat for more"
        )
    )]
    vdpa: Vec<String>,

    /// Socket device: connections between programs of the guest and of the host
    #[arg(
        long,
        value_name = "key=value,...",
        requires = "payload",
        help_heading = DEVICES,
        long_help = keys::<VsockConfig>("Socket device: connections between programs of the guest and of the host")
    )]
    vsock: Option<String>,

    /// Watchdog: resets the guest when it stops pinging
    #[arg(long, requires = "payload", help_heading = DEVICES)]
    watchdog: bool,
}

/// The help of an option, generated from the struct that it is parsed into.
pub(crate) fn keys<T: Options>(about: &str) -> String {
    format!("{about}\n\n{}", help::<T>())
}

impl VmOptions {
    /// True if a virtual machine is described.
    pub(crate) const fn is_given(&self) -> bool {
        self.kernel.is_some() || self.firmware.is_some()
    }

    /// The described virtual machine.
    ///
    /// # Errors
    ///
    /// Fails with the first invalid value. Consistency of the values is not checked.
    pub(crate) fn into_config(self) -> Result<VmConfig, ConfigError> {
        let mut config = VmConfig {
            payload: PayloadConfig {
                kernel: self.kernel,
                firmware: self.firmware,
                initramfs: self.initramfs,
                cmdline: self.cmdline,
            },
            watchdog: self.watchdog,
            pvpanic: self.pvpanic,
            landlock_enable: self.landlock,
            ..VmConfig::default()
        };
        if let Some(cpus) = self.cpus {
            config.cpus = cpus.parse()?;
        }
        if let Some(memory) = self.memory {
            config.memory = memory.parse()?;
        }
        for zone in self.memory_zone {
            config.memory.zones.push(zone.parse()?);
        }
        if let Some(rng) = self.rng {
            config.rng = rng.parse()?;
        }
        if let Some(rtc) = self.rtc {
            config.rtc = Some(rtc.parse()?);
        }
        if let Some(balloon) = self.balloon {
            config.balloon = Some(balloon.parse()?);
        }
        if let Some(mode) = self.serial {
            config.serial = console("--serial", &mode)?;
        }
        if let Some(mode) = self.console {
            config.console = console("--console", &mode)?;
        }
        if let Some(text) = self.debug_console {
            config.debug_console = text.parse()?;
        }
        for segment in self.pci_segment {
            config.pci_segments.push(segment.parse()?);
        }
        for node in self.numa {
            config.numa.push(node.parse()?);
        }
        config.tpm = self.tpm.map(|text| text.parse()).transpose()?;
        config.platform = self.platform.map(|text| text.parse()).transpose()?;
        for group in self.rate_limit_group {
            config.rate_limit_groups.push(group.parse()?);
        }
        for disk in self.disk {
            config.disks.push(disk.parse()?);
        }
        for fs in self.fs {
            config.fs.push(fs.parse()?);
        }
        for device in self.generic_vhost_user {
            config.generic_vhost_user.push(device.parse()?);
        }
        for device in self.device {
            config.devices.push(device.parse()?);
        }
        for pmem in self.pmem {
            config.pmem.push(pmem.parse()?);
        }
        for net in self.net {
            config.net.push(net.parse()?);
        }
        for vdpa in self.vdpa {
            config.vdpa.push(vdpa.parse()?);
        }
        for rule in self.landlock_rules {
            config.landlock_rules.push(rule.parse()?);
        }
        if let Some(vsock) = self.vsock {
            config.vsock = Some(vsock.parse()?);
        }
        let ids = config.ids().net;
        for vf in self.net_vf {
            vf.parse::<NetVf>()?.add_to(&mut config.net, &ids)?;
        }
        Ok(config)
    }
}

fn console(option: &str, mode: &str) -> Result<ConsoleConfig, ConfigError> {
    mode.parse().map_err(|error: vm_api::config::ParseConsoleError| ConfigError {
        subject: format!("{option} {mode}"),
        problem: Problem::Syntax(error.to_string()),
    })
}
