//! The rules of one network function, whether it is a NIC, a PF or a VF.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::Path;

use virtio_devices::{check_interface_name, is_network_mask};

use crate::config_error::{ConfigError, Problem};
use crate::config_mac::MacAddress;
use crate::config_net::{NetConfig, VfConfig};
use crate::config_sriov::BackendPlan;
use crate::config_vhost::{Vhost, VhostMode};

/// The MTUs of a NIC in bytes: from what IPv6 needs (`RFC 8200 §5`) to what Linux gives a tap, 65535 less an Ethernet header.
const MTUS: RangeInclusive<u16> = 1280..=65_521;
/// The sizes of a queue: the smallest that takes a packet's header and data apart, and the largest of `virtio 1.4 §2.7`.
pub(crate) const QUEUE_SIZES: RangeInclusive<u16> = 2..=32_768;

/// The start of an option as the user would write it, up to where the next key goes.
#[derive(Debug, Clone)]
pub(crate) struct Subject(String);

impl Subject {
    /// The NIC at position `index` of `count`.
    pub fn net(config: &NetConfig, index: usize, count: usize) -> Self {
        Self::device("--net", config.id.as_deref(), index, count)
    }

    /// The device at position `index` of the `count` that `option` describes.
    pub fn device(option: &str, id: Option<&str>, index: usize, count: usize) -> Self {
        Self(match id {
            Some(id) => format!("{option} id={id},"),
            None if count == 1 => format!("{option} "),
            None => format!("{option} number {}, ", index + 1),
        })
    }

    /// VF `index` of the NIC that is called `id`, by the user or by number.
    pub fn vf(id: &str, index: u16) -> Self {
        Self(format!("--net-vf pf={id},index={index},"))
    }

    /// The option without a further key.
    pub fn bare(&self) -> &str {
        self.0.trim_end_matches([',', ' '])
    }

    /// The option with a further key.
    pub fn key(&self, key: &str, value: impl Display) -> String {
        format!("{}{key}={value}", self.0)
    }
}

/// The longest path of a Unix socket in bytes: `sun_path` of unix(7), less the zero at its end.
const LONGEST_SOCKET: usize = 107;

/// One network function as it is wanted: what it says itself, and what it has from its PF.
#[derive(Debug)]
pub(crate) struct Nic<'a> {
    pub subject: Subject,
    tap: Option<&'a str>,
    ip: Option<IpAddr>,
    mask: Option<IpAddr>,
    mac: Option<MacAddress>,
    host_mac: Option<MacAddress>,
    pub mtu: Option<u16>,
    num_queues: u16,
    pub queue_size: u16,
    fds: &'a [i32],
    pub tso: bool,
    pub ufo: bool,
    pub csum: bool,
    vhost: Vhost,
    vhost_user: bool,
    vhost_socket: Option<&'a Path>,
    vhost_mode: VhostMode,
    vdpa: Option<&'a Path>,
}

impl<'a> Nic<'a> {
    /// A plain NIC or a PF.
    pub fn net(config: &'a NetConfig, subject: Subject) -> Self {
        Self {
            subject,
            tap: config.tap.as_deref(),
            ip: config.ip,
            mask: config.mask,
            mac: config.mac,
            host_mac: config.host_mac,
            mtu: config.mtu,
            num_queues: config.num_queues,
            queue_size: config.queue_size,
            fds: &config.fds,
            tso: config.offload_tso,
            ufo: config.offload_ufo,
            csum: config.offload_csum,
            vhost: config.vhost,
            vhost_user: config.vhost_user,
            vhost_socket: config.vhost_socket.as_deref(),
            vhost_mode: config.vhost_mode,
            vdpa: config.vdpa.as_deref(),
        }
    }

    /// A VF of `pf`, whose VFs have `num_queues` queues each.
    pub fn vf(config: &'a VfConfig, pf: &NetConfig, num_queues: u16, subject: Subject) -> Self {
        Self {
            subject,
            tap: config.tap.as_deref(),
            ip: config.ip,
            mask: config.mask,
            mac: config.mac,
            host_mac: config.host_mac,
            mtu: config.mtu.or(pf.mtu),
            num_queues,
            queue_size: config.queue_size.unwrap_or(pf.queue_size),
            fds: &config.fds,
            tso: config.offload_tso.unwrap_or(pf.offload_tso),
            ufo: config.offload_ufo.unwrap_or(pf.offload_ufo),
            csum: config.offload_csum.unwrap_or(pf.offload_csum),
            vhost: config.vhost,
            vhost_user: config.vhost_user,
            vhost_socket: config.vhost_socket.as_deref(),
            vhost_mode: config.vhost_mode,
            vdpa: config.vdpa.as_deref(),
        }
    }

    /// Checks all that concerns this function alone, in a VM of `vcpus` vCPUs. Names and addresses that others may have too
    /// are compared by the caller.
    pub fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        self.check_backend()?;
        self.check_queues(vcpus)?;
        self.check_link()?;
        self.check_tap()
    }

    /// Where its packets go. A tap without a name has `name`.
    pub fn backend(&self, name: Option<String>) -> BackendPlan {
        let vhost = self.vhost;
        match (self.vdpa, self.vhost_socket) {
            (Some(path), _) => BackendPlan::Vdpa { path: path.into(), mac: self.mac.map(|mac| mac.0) },
            (None, Some(socket)) => BackendPlan::VhostUser { socket: socket.into(), mode: self.vhost_mode },
            _ if !self.fds.is_empty() => BackendPlan::Fds { fds: self.fds.to_vec(), vhost },
            _ => BackendPlan::Tap {
                name: self.tap.map(str::to_string).or(name),
                ip: self.ip,
                mask: self.mask,
                host_mac: self.host_mac.map(|mac| mac.0),
                vhost,
            },
        }
    }

    /// Pairs of a receive and a transmit queue.
    pub const fn queue_pairs(&self) -> u16 {
        self.num_queues / 2
    }

    fn error<T>(&self, key: &str, value: impl Display, problem: Problem) -> Result<T, ConfigError> {
        Err(ConfigError::new(self.subject.key(key, value), problem))
    }

    /// There is one backend, and what is said of it is all there and about one of its kind.
    fn check_backend(&self) -> Result<(), ConfigError> {
        let conflict = |what: &str| Problem::Conflict(what.to_string());
        match (self.vdpa, self.vhost_user) {
            (Some(path), _) => self.check_no_tap("vdpa", &path.display(), "a vDPA device")?,
            (None, true) => self.check_no_tap("vhost_user", &"on", "another process")?,
            (None, false) => {}
        }
        if let Some(path) = self.vdpa.filter(|path| path.as_os_str().is_empty()) {
            let what = "no path; give the device, as /dev/vhost-vdpa-0".to_string();
            return self.error("vdpa", path.display(), Problem::Value(what));
        }
        match (self.vhost_user, self.vhost_socket) {
            (true, None) => {
                let what = "the backend's socket is missing; add socket=<path>".to_string();
                self.error("vhost_user", "on", Problem::Missing(what))
            }
            (true, Some(socket)) => self.check_socket(socket),
            (false, Some(socket)) => {
                let what = "a socket is a vhost-user backend's; add vhost_user=on, or leave socket out";
                self.error("socket", socket.display(), conflict(what))
            }
            (false, None) if self.vhost_mode == VhostMode::Server => {
                let what = "only a vhost-user backend has a mode; add vhost_user=on,socket=<path>, or leave it out";
                self.error("vhost_mode", "server", conflict(what))
            }
            (false, None) => Ok(()),
        }
    }

    /// A NIC whose backend is `kind`, as `key` says, has no other one.
    fn check_no_tap(&self, key: &str, value: &dyn Display, kind: &str) -> Result<(), ConfigError> {
        let other_backend = self.vdpa.is_some() && (self.vhost_user || self.vhost_socket.is_some());
        let settings = [
            ("tap", self.tap.is_some()),
            ("fd", !self.fds.is_empty()),
            ("vhost", self.vhost != Vhost::Off),
            ("ip", self.ip.is_some()),
            ("mask", self.mask.is_some()),
            ("host_mac", self.host_mac.is_some()),
            ("vhost_user", other_backend),
        ];
        match settings.iter().find(|(_, given)| *given) {
            Some((other, _)) => {
                let what = format!("the backend is {kind} alone; leave {other} out, or {key}");
                self.error(key, value, Problem::Conflict(what))
            }
            None => Ok(()),
        }
    }

    fn check_socket(&self, socket: &Path) -> Result<(), ConfigError> {
        let fail = |what| self.error("socket", socket.display(), Problem::Value(what));
        match socket.as_os_str().len() {
            0 => fail("no path; give the backend's socket".to_string()),
            len if len > LONGEST_SOCKET => fail(format!(
                "{len} bytes, and the path of a Unix socket has at most {LONGEST_SOCKET}; take a shorter one"
            )),
            _ => Ok(()),
        }
    }

    fn check_queues(&self, vcpus: u32) -> Result<(), ConfigError> {
        let Self { num_queues, queue_size, .. } = *self;
        if num_queues == 0 || !num_queues.is_multiple_of(2) {
            let what = "queues come in pairs; give an even number, 2 or more".to_string();
            return self.error("num_queues", num_queues, Problem::Value(what));
        }
        if u32::from(self.queue_pairs()) > vcpus {
            let what = format!(
                "{} pairs of queues for a VM with --cpus boot={vcpus}; give at most {}, or more vCPUs",
                self.queue_pairs(),
                vcpus.saturating_mul(2),
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
        if let Some(mtu) = self.mtu.filter(|mtu| !MTUS.contains(mtu)) {
            let what = format!("not an MTU that a NIC can have; give {} to {}", MTUS.start(), MTUS.end());
            return self.error("mtu", mtu, Problem::Value(what));
        }
        for (key, mac) in [("mac", self.mac), ("host_mac", self.host_mac)] {
            match mac {
                Some(mac) if mac.is_multicast() => {
                    let what = "a group address; the first byte of a NIC's address is even, as in 52:54:00:12:34:56"
                        .to_string();
                    return self.error(key, mac, Problem::Value(what));
                }
                Some(mac) if mac.is_zero() => {
                    let what = "not an address that a NIC can have; leave it out for one that is chosen".to_string();
                    return self.error(key, mac, Problem::Value(what));
                }
                _ => {}
            }
        }
        if !self.csum && (self.tso || self.ufo) {
            let what = "segmentation needs checksums; add offload_tso=off,offload_ufo=off".to_string();
            return self.error("offload_csum", "off", Problem::Conflict(what));
        }
        Ok(())
    }

    fn check_tap(&self) -> Result<(), ConfigError> {
        if let Some(tap) = self.tap {
            check_interface_name(tap).or_else(|what| self.error("tap", tap, Problem::Value(what.to_string())))?;
        }
        match (self.ip, self.mask) {
            (None, None) => {}
            (Some(ip), None) => {
                return self.error(
                    "ip",
                    ip,
                    Problem::Missing("an address needs its network mask; add mask=".to_string()),
                );
            }
            (None, Some(mask)) => {
                return self.error(
                    "mask",
                    mask,
                    Problem::Missing("a network mask needs an address; add ip=".to_string()),
                );
            }
            (Some(ip), Some(mask)) => {
                check_mask(ip, mask).or_else(|what| self.error("mask", mask, Problem::Value(what)))?;
            }
        }
        self.check_fds()
    }

    fn check_fds(&self) -> Result<(), ConfigError> {
        if self.fds.is_empty() {
            return Ok(());
        }
        if let Some(fd) = self.fds.iter().find(|fd| **fd <= 2) {
            let numbers: Vec<_> = self.fds.iter().map(i32::to_string).collect();
            let what = format!("{fd} is not the number of a tap: 0 to 2 are the standard streams; pass 3 or more");
            return self.error("fd", format_args!("[{}]", numbers.join(",")), Problem::Value(what));
        }
        // A client that sent descriptors knows nothing of the numbers that they have here.
        let (fds, pairs) = (self.fds.len(), self.queue_pairs());
        if fds != usize::from(pairs) {
            let what = format!(
                "needs as many file descriptors (fd=) as pairs of queues, {pairs} and not {fds}; pass one for each pair"
            );
            return self.error("num_queues", self.num_queues, Problem::Conflict(what));
        }
        let settings = [
            ("tap", self.tap.map(str::to_string)),
            ("ip", self.ip.map(|ip| ip.to_string())),
            ("host_mac", self.host_mac.map(|mac| mac.to_string())),
        ];
        if let Some((key, value)) = settings.into_iter().find_map(|(key, value)| Some((key, value?))) {
            let what = format!("a file descriptor (fd=) is a tap that is set up already; leave {key} out");
            return self.error(key, value, Problem::Conflict(what));
        }
        Ok(())
    }
}

fn check_mask(ip: IpAddr, mask: IpAddr) -> Result<(), String> {
    if ip.is_ipv4() != mask.is_ipv4() {
        Err(format!("not a mask for {ip}; give one of the same family"))
    } else if !is_network_mask(mask) {
        Err("not a network mask; write it as 255.255.255.0".to_string())
    } else {
        Ok(())
    }
}
