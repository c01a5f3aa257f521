//! The rules for one network function: a NIC, a PF or a VF.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use virtio_devices::{check_interface_name, is_network_mask};

use crate::config::net::policy::{self, Carrier};
use crate::config::rate;
use crate::config::socket;
use crate::config::subject::Subject;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::MacChoice;
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::net::vhost::{Vhost, VhostMode};
use vm_api::config::net::{NetConfig, SwitchPort};
use vm_api::config::rate::{BANDWIDTH, OPS};

/// MTUs of a NIC in bytes: from IPv6's minimum (`RFC 8200 §5`) to what Linux allows on a tap, 65535 less an Ethernet
/// header.
const MTUS: RangeInclusive<u16> = 1280..=65_521;
/// Queue sizes: from the smallest that holds a packet's header and data separately to the largest of `virtio 1.4 §2.7`.
pub(crate) const QUEUE_SIZES: RangeInclusive<u16> = 2..=32_768;

/// The effective settings of one network function: a VF's own over its PF's.
#[derive(Debug)]
pub(crate) struct Nic<'a> {
    /// Name in error messages.
    pub subject: &'a Subject,
    /// Settings.
    pub config: &'a NetConfig,
}

impl Nic<'_> {
    /// Checks this function by itself, in a VM of `vcpus` vCPUs. `names` checks what functions must not share.
    pub(crate) fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        self.check_backend()?;
        self.check_queues(vcpus)?;
        self.check_link()?;
        self.check_limits()?;
        policy::check(self.config, Carrier::of(self.config), self.subject)?;
        self.check_tap()
    }

    fn error<T>(&self, key: &str, value: impl Display, problem: Problem) -> Result<T, ConfigError> {
        Err(ConfigError::new(self.subject.key(key, value), problem))
    }

    /// Checks that there is one backend, fully described, and no option of another kind.
    fn check_backend(&self) -> Result<(), ConfigError> {
        let BackendConfig { vdpa, vhost_user, vhost_socket, vhost_mode, .. } = &self.config.backend;
        let conflict = |what: &str| Problem::Conflict(what.to_string());
        match (vdpa, vhost_user) {
            (Some(path), _) => self.check_no_tap("vdpa", &path.display(), "a vDPA device")?,
            (None, true) => self.check_no_tap("vhost_user", &"on", "a vhost-user backend")?,
            (None, false) => {}
        }
        if let Some(path) = vdpa.as_ref().filter(|path| path.as_os_str().is_empty()) {
            let what = "the path is empty; give the device, such as /dev/vhost-vdpa-0".to_string();
            return self.error("vdpa", path.display(), Problem::Value(what));
        }
        match (vhost_user, vhost_socket) {
            (true, None) => {
                let what = "needs the backend's socket; add socket=<path>".to_string();
                self.error("vhost_user", "on", Problem::Missing(what))
            }
            (true, Some(socket)) => socket::check(socket, self.subject),
            (false, Some(socket)) => {
                let what = "only a vhost-user backend has a socket; add vhost_user=on, or leave socket out";
                self.error("socket", socket.display(), conflict(what))
            }
            (false, None) if *vhost_mode == VhostMode::Server => {
                let what =
                    "only a vhost-user backend has a mode; add vhost_user=on,socket=<path>, or leave vhost_mode out";
                self.error("vhost_mode", "server", conflict(what))
            }
            (false, None) => Ok(()),
        }
    }

    /// Refuses a second backend besides `kind`, which `key` selects.
    ///
    /// An address of the tap (`ip`, `mask`) is kept without effect, as in Cloud Hypervisor: clients such as Kata send
    /// one with every NIC. With a vhost-user backend, the tap's MAC address is kept as well.
    fn check_no_tap(&self, key: &str, value: &dyn Display, kind: &str) -> Result<(), ConfigError> {
        let BackendConfig { tap, fds, host_mac, vdpa, vhost_user, vhost_socket, .. } = &self.config.backend;
        let settings = [
            ("tap", tap.is_some()),
            ("fd", !fds.is_empty()),
            ("vhost", self.config.backend.vhost() != Vhost::Off),
            ("host_mac", vdpa.is_some() && host_mac.is_some()),
            ("vhost_user", vdpa.is_some() && (*vhost_user || vhost_socket.is_some())),
        ];
        match settings.iter().find(|(_, given)| *given) {
            Some((other, _)) => {
                let what = format!("{other} cannot be combined with {kind}; leave {other} out, or {key}");
                self.error(key, value, Problem::Conflict(what))
            }
            None => Ok(()),
        }
    }

    fn check_queues(&self, vcpus: u32) -> Result<(), ConfigError> {
        let NetConfig { num_queues, queue_size, .. } = *self.config;
        // An odd number includes the control queue, which some clients count.
        let pairs = num_queues / 2;
        if pairs == 0 {
            let what = "a NIC has one pair of queues or more; give 2 or more".to_string();
            return self.error("num_queues", num_queues, Problem::Value(what));
        }
        if u32::from(pairs) > vcpus {
            let most = vcpus.saturating_mul(2);
            let what = format!(
                "{pairs} queue pairs, but the VM was created with or resized to {vcpus} vCPUs; give at most {most}, or \
                 more vCPUs"
            );
            return self.error("num_queues", num_queues, Problem::Conflict(what));
        }
        if !queue_size.is_power_of_two() || !QUEUE_SIZES.contains(&queue_size) {
            let (least, most) = (QUEUE_SIZES.start(), QUEUE_SIZES.end());
            let what = format!("not a power of two from {least} to {most}; 256 is usual");
            return self.error("queue_size", queue_size, Problem::Value(what));
        }
        Ok(())
    }

    fn check_link(&self) -> Result<(), ConfigError> {
        let NetConfig { mtu, mac, offload_csum, offload_tso, offload_ufo, .. } = *self.config;
        if let Some(mtu) = mtu.filter(|mtu| !MTUS.contains(mtu)) {
            let what = format!("not a valid MTU; give {} to {}", MTUS.start(), MTUS.end());
            return self.error("mtu", mtu, Problem::Value(what));
        }
        if mac == Some(MacChoice::Any) && self.config.port() != Some(SwitchPort::Vf) {
            let what = "only a VF on a switch may have any; elsewhere the guest may change an address with trust=on; \
                        leave mac out to have one chosen";
            return self.error("mac", "any", Problem::Value(what.to_string()));
        }
        for (key, mac) in [("mac", mac.and_then(MacChoice::given)), ("host_mac", self.config.backend.host_mac)] {
            match mac {
                Some(mac) if mac.is_multicast() => {
                    let what =
                        "a multicast address; give one with an even first byte, such as 52:54:00:12:34:56".to_string();
                    return self.error(key, mac, Problem::Value(what));
                }
                Some(mac) if mac.is_zero() => {
                    let what = format!("not the address of a NIC; leave {key} out to have one chosen");
                    return self.error(key, mac, Problem::Value(what));
                }
                _ => {}
            }
        }
        if self.config.standby && mac.is_none() {
            let what = "add mac=, that of the NIC that the guest uses while it has it".to_string();
            return self.error("standby", "on", Problem::Missing(what));
        }
        if !offload_csum && (offload_tso || offload_ufo) {
            let what = "segmentation needs checksum offload; add offload_tso=off,offload_ufo=off".to_string();
            return self.error("offload_csum", "off", Problem::Conflict(what));
        }
        Ok(())
    }

    /// Checks the rate limits: only packets that this program moves are limited.
    fn check_limits(&self) -> Result<(), ConfigError> {
        let Some(config) = &self.config.rate_limiter_config else { return Ok(()) };
        let limits = rate::plan(config, self.subject)?;
        let (names, limit) = match (limits.bandwidth, limits.ops) {
            (Some(limit), _) => (BANDWIDTH, limit),
            (None, Some(limit)) => (OPS, limit),
            (None, None) => return Ok(()),
        };
        let (key, carrier) = match Carrier::of(self.config) {
            Some(Carrier::Vdpa) => ("vdpa", "a vDPA device moves"),
            Some(Carrier::VhostUser) => ("vhost_user", "another process (vhost_user=on) moves"),
            Some(Carrier::VhostNet) => ("vhost", "the host's kernel (vhost=on) moves"),
            None => return Ok(()),
        };
        let what = format!(
            "{carrier} the packets, and not this program, which could limit them; leave {key} out, or lift the limit: \
             {}=0,{}=0",
            names.size, names.refill_time
        );
        self.error(names.size, limit.size, Problem::Conflict(what))
    }

    fn check_tap(&self) -> Result<(), ConfigError> {
        let BackendConfig { tap, ip, mask, .. } = &self.config.backend;
        if let Some(tap) = tap {
            check_interface_name(tap).or_else(|what| self.error("tap", tap, Problem::Value(what.to_string())))?;
        }
        let missing = |what: &str| Problem::Missing(what.to_string());
        match (*ip, *mask) {
            (None, None) => {}
            (Some(ip), None) => return self.error("ip", ip, missing("needs a network mask; add mask=")),
            (None, Some(mask)) => return self.error("mask", mask, missing("needs an address; add ip=")),
            (Some(ip), Some(mask)) => {
                check_mask(ip, mask).or_else(|what| self.error("mask", mask, Problem::Value(what)))?;
            }
        }
        self.check_fds()
    }

    fn check_fds(&self) -> Result<(), ConfigError> {
        let BackendConfig { fds, tap, host_mac, .. } = &self.config.backend;
        let num_queues = self.config.num_queues;
        if fds.is_empty() {
            return Ok(());
        }
        if let Some(fd) = fds.iter().find(|fd| **fd <= 2) {
            let numbers: Vec<_> = fds.iter().map(i32::to_string).collect();
            let what = format!("{fd} is a standard stream, not a tap; open the tap as 3 or above");
            return self.error("fd", format_args!("[{}]", numbers.join(",")), Problem::Value(what));
        }
        // The numbers are not shown: they mean nothing to a client that sent descriptors.
        let count = fds.len();
        if self.config.switch.is_some() && count != 1 {
            let what = format!("the uplink of a switch has one queue; pass 1 file descriptor (fd=) instead of {count}");
            return self.error("num_queues", num_queues, Problem::Conflict(what));
        }
        let pairs = if self.config.switch.is_some() { 1 } else { num_queues / 2 };
        if count != usize::from(pairs) {
            let what = format!("each queue pair needs a file descriptor (fd=); pass {pairs} instead of {count}");
            return self.error("num_queues", num_queues, Problem::Conflict(what));
        }
        // `ip` and `mask` are kept without effect, as in `check_no_tap`.
        let settings = [("tap", tap.clone()), ("host_mac", host_mac.map(|mac| mac.to_string()))];
        if let Some((key, value)) = settings.into_iter().find_map(|(key, value)| Some((key, value?))) {
            let what = format!("the tap behind a file descriptor (fd=) is already set up; leave {key} out");
            return self.error(key, value, Problem::Conflict(what));
        }
        Ok(())
    }
}

fn check_mask(ip: IpAddr, mask: IpAddr) -> Result<(), String> {
    if ip.is_ipv4() != mask.is_ipv4() {
        Err(format!("not a mask for {ip}; give one of the same address family"))
    } else if !is_network_mask(mask) {
        Err("not a network mask; write it as 255.255.255.0".to_string())
    } else {
        Ok(())
    }
}
