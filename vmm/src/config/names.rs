//! Names, MAC addresses and taps of the functions of a VM. All are unique, except for MAC addresses of different
//! devices.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_devices::check_interface_name;

use crate::config::net::pool::Pool;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::{check_id, vf_id};
use vm_api::config::mac::{MacAddress, MacChoice};
use vm_api::config::net::NetConfig;
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::option::Options as _;
use vm_api::config::vdpa::VdpaConfig;

/// Names of a function.
#[derive(Debug)]
pub(crate) struct Name {
    /// Name.
    pub id: String,
    /// MAC address.
    pub mac: MacAddress,
    /// The name of its tap; `None` for any, or without a tap.
    pub tap: Option<String>,
}

/// Names of a NIC and its VFs.
#[derive(Debug)]
pub(crate) struct Names {
    /// The NIC or PF.
    pub pf: Name,
    /// The VFs by index.
    pub vfs: Vec<Name>,
}

impl Names {
    /// Names all functions, in the order of the NICs.
    ///
    /// Claims the user's names first, then those derived from them, then random ones, so that no choice
    /// made here conflicts with one of the user's.
    pub(crate) fn choose(pools: &[Pool<'_>]) -> Result<Vec<Self>, ConfigError> {
        check_ids(pools)?;
        let macs = macs(pools)?;
        let taps = taps(pools)?;
        check_fds(pools)?;
        check_paths(pools)?;
        let names = pools.iter().zip(macs).zip(taps).map(|((pool, pf_mac), taps)| {
            let vf = |((index, config), tap): ((u16, &NetConfig), _)| {
                let mac = given(config).unwrap_or_else(|| pf_mac.vf(index));
                Name { id: vf_id(&pool.id, index), mac, tap }
            };
            let vfs = (0..).zip(&pool.vfs).zip(taps.vfs).map(vf).collect();
            Self { pf: Name { id: pool.id.clone(), mac: pf_mac, tap: taps.pf }, vfs }
        });
        Ok(names.collect())
    }
}

/// Names that only one function can have, and the function that has each.
struct Claims<'a, K>(HashMap<K, (&'a Pool<'a>, Option<u16>)>);

impl<'a, K: Eq + Hash> Claims<'a, K> {
    fn new() -> Self {
        Self(HashMap::new())
    }

    /// Claims `key` for a function, or fails with the name of its owner.
    fn claim(&mut self, key: K, pool: &'a Pool<'a>, vf: Option<u16>) -> Result<(), String> {
        match self.0.get(&key) {
            Some((pool, Some(index))) => Err(format!("VF {index} of {}", pool.id)),
            Some((pool, None)) => Err(pool.id.clone()),
            None => {
                self.0.insert(key, (pool, vf));
                Ok(())
            }
        }
    }
}

fn in_use(subject: String, what: String, user: String, remedy: &str) -> ConfigError {
    ConfigError::new(subject, Problem::InUse { what, user, remedy: remedy.to_string() })
}

const EACH_ITS_OWN: &str = "give each NIC and each VF its own";
const GIVE_BY_NET_VF: &str = "give the VF another by --net-vf";

/// Checks the ids of the NICs: well formed, and different from each other and from those of VFs.
fn check_ids(pools: &[Pool<'_>]) -> Result<(), ConfigError> {
    let mut used = HashSet::new();
    for pool in pools {
        let Some(id) = &pool.pf.id else { continue };
        let subject = || pool.subject(None).bare().to_string();
        check_id(id).map_err(|problem| ConfigError::new(subject(), problem))?;
        if !used.insert(id.clone()) {
            return Err(in_use(subject(), "this id".to_string(), "another NIC".to_string(), "give each NIC its own"));
        }
    }
    for pool in pools {
        let id = &pool.id;
        if let Some(index) = (0..pool.pf.sriov_vfs).find(|index| used.contains(&vf_id(id, *index))) {
            let (subject, user) = (format!("--net id={}", vf_id(id, index)), format!("VF {index} of {id}"));
            return Err(in_use(subject, "this id".to_string(), user, "give the NIC another"));
        }
    }
    Ok(())
}

/// The address that a function was given.
fn given(config: &NetConfig) -> Option<MacAddress> {
    config.mac.and_then(MacChoice::given)
}

/// Chooses the MAC addresses of the NICs so that no two functions of a device have the same: they may be ports of one
/// switch, which sends a packet to the function that has its address. Devices may share an address, as with clients
/// such as Kata, but not one chosen here.
fn macs<'a>(pools: &'a [Pool<'a>]) -> Result<Vec<MacAddress>, ConfigError> {
    let mut claims = Claims::new();
    for pool in pools {
        let mut own = Claims::new();
        for (vf, config) in pool.functions() {
            let Some(mac) = given(config) else { continue };
            own.claim(mac, pool, vf).map_err(|user| {
                in_use(pool.subject(vf).key("mac", mac), format!("MAC address {mac}"), user, EACH_ITS_OWN)
            })?;
        }
        let Some(pf) = given(pool.pf) else {
            claims.0.extend(own.0);
            continue;
        };
        for index in pool.vfs_without_mac() {
            let mac = pf.vf(index);
            // The fault is the given address: the other one follows from the PF's.
            let given_to = own.0.get(&mac).map(|(_, vf)| *vf);
            own.claim(mac, pool, Some(index)).map_err(|_| {
                let user = format!("VF {index} of {}, whose address follows from its PF's", pool.id);
                let subject = pool.subject(given_to.flatten()).key("mac", mac);
                in_use(subject, format!("MAC address {mac}"), user, EACH_ITS_OWN)
            })?;
        }
        claims.0.extend(own.0);
    }
    // Drawn last: given addresses, and those derived from them, must not depend on random ones.
    pools.iter().map(|pool| given(pool.pf).map_or_else(|| draw_mac(pool, &mut claims), Ok)).collect()
}

/// Draws an address so that neither it nor one that a VF derives from it is in use, and claims them.
fn draw_mac<'a>(pool: &'a Pool<'a>, claims: &mut Claims<'a, MacAddress>) -> Result<MacAddress, ConfigError> {
    loop {
        let mut bytes = [0; 6];
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|error| {
            let what = format!("cannot get a random MAC address from the host ({error}); add mac=");
            ConfigError::new(pool.subject(None).bare(), Problem::Host(what))
        })?;
        let pf = MacAddress::local(bytes);
        let free = |mac| !claims.0.contains_key(&mac);
        if free(pf) && pool.vfs_without_mac().all(|index| free(pf.vf(index))) {
            claims.0.insert(pf, (pool, None));
            claims.0.extend(pool.vfs_without_mac().map(|index| (pf.vf(index), (pool, Some(index)))));
            return Ok(pf);
        }
    }
}

/// The names of the taps of a NIC and of its VFs; `None` for any that is free, or without a tap.
struct Taps {
    pf: Option<String>,
    vfs: Vec<Option<String>>,
}

/// Names the taps of the NICs and their VFs.
fn taps<'a>(pools: &'a [Pool<'a>]) -> Result<Vec<Taps>, ConfigError> {
    let mut claims = Claims::new();
    for pool in pools {
        for (vf, config) in pool.functions() {
            let Some(tap) = &config.backend.tap else { continue };
            claims
                .claim(tap.clone(), pool, vf)
                .map_err(|user| in_use(pool.subject(vf).key("tap", tap), format!("tap {tap}"), user, EACH_ITS_OWN))?;
        }
    }
    pools.iter().enumerate().map(|(nic, pool)| pool_taps(pool, nic, &mut claims)).collect()
}

/// Names the taps of a NIC and of its VFs, once all names that are given have been claimed.
fn pool_taps<'a>(pool: &'a Pool<'a>, nic: usize, claims: &mut Claims<'a, String>) -> Result<Taps, ConfigError> {
    if pool.vfs.is_empty() {
        return Ok(Taps { pf: pool.pf.backend.tap.clone(), vfs: Vec::new() });
    }
    if pool.pf.switch.is_some() {
        // A port of a switch has no tap, and other functions name theirs.
        let vfs = pool.vfs.iter().map(|config| config.backend.tap.clone()).collect();
        return Ok(Taps { pf: pool.pf.backend.tap.clone(), vfs });
    }
    let pf = pool.pf.backend.tap.clone().unwrap_or_else(|| own_tap(pool, nic, claims));
    let mut vfs = Vec::with_capacity(pool.vfs.len());
    for (index, config) in (0..).zip(&pool.vfs) {
        let BackendConfig { tap, fds, vhost_user, vdpa, .. } = &config.backend;
        let tap = match tap {
            _ if !fds.is_empty() || *vhost_user || vdpa.is_some() => None,
            Some(tap) => Some(tap.clone()),
            None => {
                let tap = vf_tap(pool, &pf, index)?;
                claims.claim(tap.clone(), pool, Some(index)).map_err(|user| {
                    let what = format!("tap {tap} of VF {index}");
                    in_use(pool.subject(None).key("sriov_vfs", pool.vfs.len()), what, user, GIVE_BY_NET_VF)
                })?;
                Some(tap)
            }
        };
        vfs.push(tap);
    }
    Ok(Taps { pf: Some(pf), vfs })
}

/// The tap name of a PF that was given none, from which its VFs' taps are named: `vm`, the number of this process in
/// hexadecimal, and a letter for the NIC's position, or the next free one, because positions change when NICs are
/// removed. With the largest process number (2^22) and VF index it has 15 characters.
fn own_tap<'a>(pool: &'a Pool<'a>, nic: usize, claims: &mut Claims<'a, String>) -> String {
    let letters = ('a'..='z').chain('A'..='Z');
    let mut names = letters.cycle().skip(nic).take(52).map(|letter| format!("vm{:x}{letter}", std::process::id()));
    let free = names.find(|name| claims.claim(name.clone(), pool, None).is_ok());
    // There are fewer slots than letters.
    free.unwrap_or_default()
}

/// The tap name of a VF that was given none.
fn vf_tap(pool: &Pool<'_>, pf: &str, index: u16) -> Result<String, ConfigError> {
    let tap = format!("{pf}v{index}");
    if check_interface_name(&tap).is_ok() {
        return Ok(tap);
    }
    let subject = format!("{},sriov_vfs={}", pool.subject(None).key("tap", pf), pool.vfs.len());
    let what = format!(
        "the tap of VF {index} would be {tap}, longer than the 15 characters of an interface name; shorten the tap's \
         name, \
         or name the VF's tap by --net-vf"
    );
    Err(ConfigError::new(subject, Problem::Value(what)))
}

/// Checks that each descriptor is used by one queue pair.
fn check_fds<'a>(pools: &'a [Pool<'a>]) -> Result<(), ConfigError> {
    let mut claims = Claims::new();
    for pool in pools {
        for (vf, config) in pool.functions() {
            for fd in &config.backend.fds {
                claims.claim(*fd, pool, vf).map_err(|user| {
                    let remedy = "open the tap once for each queue pair";
                    in_use(pool.subject(vf).key("fd", fd), "this descriptor".to_string(), user, remedy)
                })?;
            }
        }
    }
    Ok(())
}

/// Checks that each vDPA device and each vhost-user socket is used by one function. Two paths to the same one are found
/// when they are opened.
fn check_paths<'a>(pools: &'a [Pool<'a>]) -> Result<(), ConfigError> {
    let mut claims = Claims::new();
    for pool in pools {
        let device = if pool.option == VdpaConfig::OPTION { "path" } else { "vdpa" };
        for (vf, config) in pool.functions() {
            let paths = [
                ("socket", &config.backend.vhost_socket, "this socket"),
                (device, &config.backend.vdpa, "this device"),
            ];
            for (key, path, what) in paths {
                let Some(path) = path else { continue };
                claims.claim(path.clone(), pool, vf).map_err(|user| {
                    in_use(pool.subject(vf).key(key, path.display()), what.to_string(), user, EACH_ITS_OWN)
                })?;
            }
        }
    }
    Ok(())
}
