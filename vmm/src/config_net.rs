//! Network devices: `--net`, `--net-vf`, and their JSON.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::config_error::{ConfigError, Problem};
use crate::config_mac::MacAddress;
use crate::config_names::ids;
use crate::config_options::pairs;
use crate::config_rate::RateLimiterConfig;
use crate::config_sriov::NetPlan;
use crate::config_value::{Key, Options, options, read};
use crate::config_vhost::{Vhost, VhostMode};

options! {
    /// A NIC, which is an SR-IOV physical function when it reserves virtual functions.
    pub struct NetConfig for "--net" {
        /// Name of the device, unique in the VM; not starting with two underscores; if it is left out, _net0, _net1 and so on.
        "id" = "<name>" => id: Option<String> = None;
        /// Tap interface on the host, at most 15 characters; created, and removed at the end, if it does not exist.
        "tap" = "<interface>" => tap: Option<String> = None;
        /// Address of the tap on the host; needs mask.
        "ip" = "<address>" => ip: Option<IpAddr> = None;
        /// Network mask of ip.
        "mask" = "<mask>" => mask: Option<IpAddr> = None;
        /// MAC address in the guest; if it is left out, a random one at each start.
        "mac" = "<address>" => mac: Option<MacAddress> = None;
        /// MAC address of the tap on the host.
        "host_mac" = "<address>" => host_mac: Option<MacAddress> = None;
        /// Largest packet of the link, 1280 to 65521 bytes.
        "mtu" = "<bytes>" => mtu: Option<u16> = None;
        /// Number of queues, receive and transmit counted apart: two for each vCPU at most.
        "num_queues" = "<number>" => num_queues: u16 = 2;
        /// Entries of each queue: a power of two from 2 to 32768; below 128 the driver gets no segments of several frames.
        "queue_size" = "<number>" => queue_size: u16 = 256;
        /// Taps that are open already, a file descriptor above 2 for each pair of queues, in place of tap.
        "fd" = "[<fd>,...]" => fds: Vec<i32> = Vec::new();
        /// Whether packets above the MTU are taken from the guest and given to it, to be segmented outside of it.
        "offload_tso" = "on|off" => offload_tso: bool = true;
        /// As offload_tso, for UDP.
        "offload_ufo" = "on|off" => offload_ufo: bool = true;
        /// Whether checksums are left to the other side; offload_tso and offload_ufo need it.
        "offload_csum" = "on|off" => offload_csum: bool = true;
        /// PCI segment; only 0 so far.
        "pci_segment" = "<number>" => pci_segment: u16 = 0;
        /// Device number on bus 0, 1 to 31; if it is left out, the lowest that is free.
        "pci_device_id" = "<number>" => pci_device_id: Option<u8> = None;
        /// Whether the device is behind a virtual IOMMU; only off so far.
        "iommu" = "on|off" => iommu: bool = false;
        /// Whether the host's kernel carries the tap's packets (vhost-net); auto: if it can.
        "vhost" = "on|off|auto" => vhost: Vhost = Vhost::Off;
        /// Whether another process carries the packets, in place of a tap; needs socket.
        "vhost_user" = "on|off" => vhost_user: bool = false;
        /// Unix socket of the vhost-user backend.
        "socket" = "<path>" => vhost_socket: Option<PathBuf> = None;
        /// client: the vhost-user backend listens on the socket; server: this program does.
        "vhost_mode" = "client|server" => vhost_mode: VhostMode = VhostMode::Client;
        /// vDPA device of the host, as /dev/vhost-vdpa-0, in place of a tap; its own MAC address applies if mac is left out.
        "vdpa" = "<path>" => vdpa: Option<PathBuf> = None;
        /// Limits of bandwidth and packet rate; not yet.
        rate_limiter_config: Option<RateLimiterConfig> = None;
        /// Number of SR-IOV virtual functions to reserve, up to 32512; the guest enables them by sriov_numvfs.
        "sriov_vfs" = "<number>" => sriov_vfs: u16 = 0;
        /// What is particular to single VFs (--net-vf on the command line); the others have a tap of their own.
        vfs: Vec<VfConfig> = Vec::new();
    }
    later {
        "bw_size" | "bw_one_time_burst" | "bw_refill_time" | "ops_size" | "ops_one_time_burst" | "ops_refill_time"
            => "rate limits are";
    }
}

impl NetConfig {
    /// The configuration of VF `index`, which there is from now on if there was none.
    pub(crate) fn vf_mut(&mut self, index: u16) -> &mut VfConfig {
        let position = self.vfs.iter().position(|vf| vf.index == index).unwrap_or_else(|| {
            self.vfs.push(VfConfig { index, ..VfConfig::default() });
            self.vfs.len() - 1
        });
        &mut self.vfs[position]
    }

    /// Fills in the MAC addresses of VFs that `plan` made of a PF's that is not kept.
    pub(crate) fn keep_vf_macs(&mut self, plan: &NetPlan) {
        let vfs = (0..).zip(&plan.vfs);
        for (index, vf) in vfs.filter(|(_, vf)| !vf.backend.has_own_mac()) {
            self.vf_mut(index).mac = Some(MacAddress(vf.mac));
        }
    }
}

options! {
    /// A virtual function, as far as it is not as its PF makes it.
    pub struct VfConfig for "--net-vf" {
        /// Number of the VF, from 0 to the PF's sriov_vfs less 1.
        "index" = "<number>" => index: u16 = 0, required;
        /// Tap interface on the host; if it is left out, the PF's with v and the index appended: pf0v3.
        "tap" = "<interface>" => tap: Option<String> = None;
        /// Address of the tap on the host; needs mask.
        "ip" = "<address>" => ip: Option<IpAddr> = None;
        /// Network mask of ip.
        "mask" = "<mask>" => mask: Option<IpAddr> = None;
        /// MAC address in the guest; if it is left out, one that is made of the PF's and the index, the same at each start if
        /// the PF's is given.
        "mac" = "<address>" => mac: Option<MacAddress> = None;
        /// MAC address of the tap on the host.
        "host_mac" = "<address>" => host_mac: Option<MacAddress> = None;
        /// Largest packet of the link, 1280 to 65521 bytes; if it is left out, the PF's.
        "mtu" = "<bytes>" => mtu: Option<u16> = None;
        /// Number of queues, the same for all VFs of a PF: what one VF says holds for all; 2 if none says.
        "num_queues" = "<number>" => num_queues: Option<u16> = None;
        /// Entries of each queue: a power of two from 2 to 32768; if it is left out, the PF's.
        "queue_size" = "<number>" => queue_size: Option<u16> = None;
        /// Taps that are open already, a file descriptor above 2 for each pair of queues, in place of tap.
        "fd" = "[<fd>,...]" => fds: Vec<i32> = Vec::new();
        /// As for --net; if it is left out, the PF's.
        "offload_tso" = "on|off" => offload_tso: Option<bool> = None;
        /// As for --net; if it is left out, the PF's.
        "offload_ufo" = "on|off" => offload_ufo: Option<bool> = None;
        /// As for --net; if it is left out, the PF's.
        "offload_csum" = "on|off" => offload_csum: Option<bool> = None;
        /// As for --net, and this VF's alone.
        "vhost" = "on|off|auto" => vhost: Vhost = Vhost::Off;
        /// Whether another process carries the packets, in place of a tap; needs socket.
        "vhost_user" = "on|off" => vhost_user: bool = false;
        /// Unix socket of the vhost-user backend.
        "socket" = "<path>" => vhost_socket: Option<PathBuf> = None;
        /// client: the vhost-user backend listens on the socket; server: this program does.
        "vhost_mode" = "client|server" => vhost_mode: VhostMode = VhostMode::Client;
        /// vDPA device of the host, as /dev/vhost-vdpa-0, in place of a tap; its own MAC address applies if mac is left out.
        "vdpa" = "<path>" => vdpa: Option<PathBuf> = None;
    }
    later {}
}

/// A VF on the command line, where it says itself which PF it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetVf {
    /// The id of the PF.
    pub pf: String,
    /// The VF.
    pub vf: VfConfig,
}

impl NetVf {
    /// Appends the VF to the NIC of `nets` that it names. A NIC without an id is `_net0`, `_net1` and so on, as in reports.
    ///
    /// # Errors
    ///
    /// No NIC is called so.
    pub fn add_to(self, nets: &mut [NetConfig]) -> Result<(), ConfigError> {
        let Self { pf, vf } = self;
        let ids = ids(nets);
        match nets.iter_mut().zip(ids).find(|(_, id)| *id == pf) {
            Some((net, _)) => {
                net.vfs.push(vf);
                Ok(())
            }
            None => {
                let what = format!("no NIC is called {pf}; give one --net id={pf},sriov_vfs=<number>");
                Err(ConfigError::new(format!("--net-vf pf={pf},index={}", vf.index), Problem::Missing(what)))
            }
        }
    }
}

impl Options for NetVf {
    const OPTION: &'static str = VfConfig::OPTION;

    fn keys() -> Vec<Key> {
        let about = "The id of the NIC that the VF belongs to; the first one without an id is _net0.".to_string();
        let mut keys = vec![Key { name: "pf", syntax: "<id>", default: None, about }];
        keys.extend(VfConfig::keys());
        keys
    }
}

impl FromStr for NetVf {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |what| ConfigError::new(format!("{} {text}", Self::OPTION), Problem::Syntax(what));
        let pairs = pairs(text).map_err(wrong)?;
        let (pf, rest): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|pair| pair.key == "pf");
        let pf = match pf.into_iter().last().and_then(|pair| pair.value) {
            Some(raw) => read(&raw).map_err(wrong)?,
            None => None,
        };
        let missing = || wrong("pf= has to be given: the id of the NIC that the VF belongs to".to_string());
        Ok(Self { pf: pf.ok_or_else(missing)?, vf: VfConfig::from_pairs(rest)? })
    }
}
