//! What each function of a VM is called: its name, its MAC address and its tap. All are decided here, and no two are the same.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_devices::check_interface_name;

use crate::config_error::{ConfigError, Problem};
use crate::config_mac::MacAddress;
use crate::config_net::{NetConfig, VfConfig};
use crate::config_nic::Subject;
use crate::config_sriov::Pool;
use crate::config_value::Options;
use crate::config_vdpa::VdpaConfig;

/// The names of a NIC and of its VFs.
#[derive(Debug)]
pub(crate) struct Names {
    /// The device's name.
    pub id: String,
    /// The MAC address of the NIC or PF.
    pub mac: MacAddress,
    /// The name of its tap; `None` for any, or without a tap.
    pub tap: Option<String>,
    /// The same of the VFs, by index.
    pub vfs: Vec<(String, MacAddress, Option<String>)>,
}

impl Names {
    /// Decides the names of all functions, in the order of the NICs.
    ///
    /// What the user gave is taken first, then what follows from it, then what is random, so that a choice of ours never stands
    /// in the way of one of the user's.
    pub fn choose(pools: &[Pool<'_>]) -> Result<Vec<Self>, ConfigError> {
        check_ids(pools)?;
        let ids: Vec<_> = pools.iter().map(|pool| pool.id.clone()).collect();
        let macs = macs(pools, &ids)?;
        let taps = taps(pools, &ids)?;
        check_fds(pools, &ids)?;
        check_paths(pools, &ids)?;
        let nics = pools.iter().zip(ids).zip(macs).zip(taps);
        let names = nics.map(|(((pool, id), mac), taps)| {
            let vf = |((index, config), tap)| (vf_id(&id, index), vf_mac(config, mac, index), tap);
            let vfs = pool.vfs_by_index().zip(taps.vfs).map(vf).collect();
            Self { id, mac, tap: taps.pf, vfs }
        });
        Ok(names.collect())
    }
}

/// One function of the VM: a NIC by its position, or a VF of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Function {
    nic: usize,
    vf: Option<u16>,
}

impl Function {
    /// What it is called in reports.
    fn describe(self, ids: &[String]) -> String {
        let nic = ids.get(self.nic).map_or("a NIC", String::as_str);
        match self.vf {
            Some(index) => format!("VF {index} of {nic}"),
            None => nic.to_string(),
        }
    }
}

/// What only one function can have, and who has it.
struct Claims<'a, K> {
    ids: &'a [String],
    users: HashMap<K, Function>,
}

impl<'a, K: Eq + Hash> Claims<'a, K> {
    fn new(ids: &'a [String]) -> Self {
        Self { ids, users: HashMap::new() }
    }

    /// Gives `key` to `user`, or says who has it.
    fn claim(&mut self, key: K, user: Function) -> Result<(), String> {
        match self.users.get(&key) {
            Some(first) => Err(first.describe(self.ids)),
            None => {
                self.users.insert(key, user);
                Ok(())
            }
        }
    }
}

fn in_use(subject: String, what: String, user: String, remedy: &str) -> ConfigError {
    ConfigError::new(subject, Problem::InUse { what, user, remedy: remedy.to_string() })
}

fn vf_id(nic: &str, index: u16) -> String {
    format!("{nic}v{index}")
}

fn vf_mac(config: Option<&VfConfig>, pf: MacAddress, index: u16) -> MacAddress {
    config.and_then(|vf| vf.mac).unwrap_or_else(|| pf.vf(index))
}

/// What the NICs are called: as the user did, or `_net` with the lowest number that is free. Ids that the user gave twice, or that
/// cannot be, are still among them.
pub(crate) fn ids(nets: &[NetConfig]) -> Vec<String> {
    numbered("_net", nets.iter().map(|net| net.id.as_deref()))
}

/// A name that a device can have.
pub(crate) fn check_id(id: &str) -> Result<(), Problem> {
    if id.is_empty() || id.starts_with("__") || id.chars().any(char::is_control) {
        let what = "not a name for a device; two underscores at the start are kept for the VM's own".to_string();
        return Err(Problem::Value(what));
    }
    Ok(())
}

/// What devices are called: as the user did, or `prefix` with the lowest number that is free.
pub(crate) fn numbered<'a>(prefix: &str, given: impl Iterator<Item = Option<&'a str>> + Clone) -> Vec<String> {
    let used: HashSet<_> = given.clone().flatten().collect();
    let mut free = (0u32..).map(|number| format!("{prefix}{number}")).filter(|id| !used.contains(id.as_str()));
    given.map(|id| id.map(str::to_string).or_else(|| free.next()).unwrap_or_default()).collect()
}

/// Each NIC has an id that can be, and that no other device has.
fn check_ids(pools: &[Pool<'_>]) -> Result<(), ConfigError> {
    let mut used = HashSet::new();
    for pool in pools {
        let Some(id) = &pool.config.id else { continue };
        let subject = || pool.subject.bare().to_string();
        check_id(id).map_err(|problem| ConfigError::new(subject(), problem))?;
        if !used.insert(id.clone()) {
            return Err(in_use(subject(), "this id".to_string(), "another NIC".to_string(), "give each NIC its own"));
        }
    }
    for pool in pools {
        let id = &pool.id;
        if let Some((index, _)) = pool.vfs_by_index().find(|(index, _)| used.contains(&vf_id(id, *index))) {
            let (subject, user) = (format!("--net id={}", vf_id(id, index)), format!("VF {index} of {id}"));
            return Err(in_use(subject, "this id".to_string(), user, "give the NIC another"));
        }
    }
    Ok(())
}

/// Chooses the MAC addresses of the NICs, such that theirs and those of all their VFs are different.
fn macs(pools: &[Pool<'_>], ids: &[String]) -> Result<Vec<MacAddress>, ConfigError> {
    let mut claims = Claims::new(ids);
    let taken = |subject, mac: MacAddress, user| {
        in_use(subject, format!("MAC address {mac}"), user, "give each NIC and each VF its own")
    };
    for (nic, pool) in pools.iter().enumerate() {
        if let Some(mac) = pool.config.mac {
            let claim = claims.claim(mac, Function { nic, vf: None });
            claim.map_err(|user| taken(pool.subject.key("mac", mac), mac, user))?;
        }
        for vf in &pool.config.vfs {
            let Some(mac) = vf.mac else { continue };
            let claim = claims.claim(mac, Function { nic, vf: Some(vf.index) });
            claim.map_err(|user| taken(pool.vf_subject(vf.index).key("mac", mac), mac, user))?;
        }
    }
    // Those of the VFs whose PF's address is given must not depend on what is drawn for another NIC.
    for (nic, pool) in pools.iter().enumerate() {
        let Some(pf) = pool.config.mac else { continue };
        for index in pool.vfs_without_mac() {
            let mac = pf.vf(index);
            claims.claim(mac, Function { nic, vf: Some(index) }).map_err(|user| {
                let what = format!("MAC address {mac} of VF {index}");
                in_use(pool.subject.key("mac", pf), what, user, "give the VF another by --net-vf")
            })?;
        }
    }
    let mut macs = Vec::with_capacity(pools.len());
    for (nic, pool) in pools.iter().enumerate() {
        let mac = match pool.config.mac {
            Some(mac) => mac,
            None => draw_mac(pool, nic, &mut claims)?,
        };
        macs.push(mac);
    }
    Ok(macs)
}

/// Draws an address such that neither it nor one that a VF has from it is in use, and claims them.
fn draw_mac(pool: &Pool<'_>, nic: usize, claims: &mut Claims<'_, MacAddress>) -> Result<MacAddress, ConfigError> {
    loop {
        let mut bytes = [0; 6];
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|error| {
            let what = format!("no random MAC address can be had from the host ({error}); add mac=");
            ConfigError::new(pool.subject.bare(), Problem::Host(what))
        })?;
        let pf = MacAddress::local(bytes);
        let free = |mac| !claims.users.contains_key(&mac);
        if free(pf) && pool.vfs_without_mac().all(|index| free(pf.vf(index))) {
            claims.users.insert(pf, Function { nic, vf: None });
            let vfs = pool.vfs_without_mac().map(|index| (pf.vf(index), Function { nic, vf: Some(index) }));
            claims.users.extend(vfs);
            return Ok(pf);
        }
    }
}

/// The names of a NIC's taps; `None` for any that is free, or without a tap.
struct Taps {
    pf: Option<String>,
    vfs: Vec<Option<String>>,
}

/// Names the taps of the NICs and their VFs.
fn taps(pools: &[Pool<'_>], ids: &[String]) -> Result<Vec<Taps>, ConfigError> {
    let mut claims = Claims::new(ids);
    let mut claim = |subject: Subject, tap: &String, function| {
        claims.claim(tap.clone(), function).map_err(|user| {
            in_use(subject.key("tap", tap), format!("tap {tap}"), user, "give each NIC and each VF its own")
        })
    };
    for (nic, pool) in pools.iter().enumerate() {
        if let Some(tap) = &pool.config.tap {
            claim(pool.subject.clone(), tap, Function { nic, vf: None })?;
        }
        for vf in &pool.config.vfs {
            if let Some(tap) = &vf.tap {
                claim(pool.vf_subject(vf.index), tap, Function { nic, vf: Some(vf.index) })?;
            }
        }
    }
    pools.iter().enumerate().map(|(nic, pool)| pool_taps(pool, nic, &mut claims)).collect()
}

/// Names the taps of a NIC and of its VFs, after all names that are given have been claimed.
fn pool_taps(pool: &Pool<'_>, nic: usize, claims: &mut Claims<'_, String>) -> Result<Taps, ConfigError> {
    if pool.vfs.is_empty() {
        return Ok(Taps { pf: pool.config.tap.clone(), vfs: Vec::new() });
    }
    let pf = pool.config.tap.clone().unwrap_or_else(|| own_tap(nic, claims));
    let mut vfs = Vec::with_capacity(pool.vfs.len());
    for (index, config) in pool.vfs_by_index() {
        let tap = match config {
            Some(vf) if !vf.fds.is_empty() || vf.vhost_user || vf.vdpa.is_some() => None,
            Some(VfConfig { tap: Some(tap), .. }) => Some(tap.clone()),
            _ => {
                let tap = vf_tap(pool, &pf, index)?;
                claims.claim(tap.clone(), Function { nic, vf: Some(index) }).map_err(|user| {
                    let what = format!("tap {tap} of VF {index}");
                    let subject = pool.subject.key("sriov_vfs", pool.vfs.len());
                    in_use(subject, what, user, "give the VF another by --net-vf")
                })?;
                Some(tap)
            }
        };
        vfs.push(tap);
    }
    Ok(Taps { pf: Some(pf), vfs })
}

/// The tap name of a PF that was given none, which the names of its VFs' taps are made of: `vm`, the number of this process in
/// hexadecimal, and a letter for the NIC, or the next one that no other NIC has: places change when NICs go. With the largest
/// process number (2^22) and the largest VF index it has 15 characters.
fn own_tap(nic: usize, claims: &mut Claims<'_, String>) -> String {
    let letters = ('a'..='z').chain('A'..='Z');
    let mut names = letters.cycle().skip(nic).take(52).map(|letter| format!("vm{:x}{letter}", std::process::id()));
    let free = names.find(|name| claims.claim(name.clone(), Function { nic, vf: None }).is_ok());
    // There are fewer slots than letters.
    free.unwrap_or_default()
}

/// The tap name of a VF that was given none.
fn vf_tap(pool: &Pool<'_>, pf: &str, index: u16) -> Result<String, ConfigError> {
    let tap = format!("{pf}v{index}");
    if check_interface_name(&tap).is_ok() {
        return Ok(tap);
    }
    let subject = format!("{},sriov_vfs={}", pool.subject.key("tap", pf), pool.vfs.len());
    let what = format!(
        "the tap of VF {index} would be {tap}, and the name of an interface has at most 15 characters; \
         take a shorter tap name, or name the VF's tap by --net-vf"
    );
    Err(ConfigError::new(subject, Problem::Value(what)))
}

/// A descriptor is one queue pair's.
fn check_fds(pools: &[Pool<'_>], ids: &[String]) -> Result<(), ConfigError> {
    let mut claims = Claims::new(ids);
    for (nic, pool) in pools.iter().enumerate() {
        let pf = (pool.subject.clone(), Function { nic, vf: None }, &pool.config.fds);
        let vfs = pool.config.vfs.iter();
        let vfs = vfs.map(|vf| (pool.vf_subject(vf.index), Function { nic, vf: Some(vf.index) }, &vf.fds));
        for (subject, function, fds) in std::iter::once(pf).chain(vfs) {
            for fd in fds {
                claims.claim(*fd, function).map_err(|user| {
                    in_use(subject.key("fd", fd), "this descriptor".to_string(), user, "open a tap's queue for each")
                })?;
            }
        }
    }
    Ok(())
}

/// A vDPA device is one function's, and so is what a vhost-user socket leads to. Whether two paths lead to one of them shows when they
/// are opened.
fn check_paths(pools: &[Pool<'_>], ids: &[String]) -> Result<(), ConfigError> {
    let mut claims = Claims::new(ids);
    for (nic, pool) in pools.iter().enumerate() {
        let NetConfig { vhost_socket, vdpa, .. } = pool.config;
        let pf = (pool.subject.clone(), Function { nic, vf: None }, vhost_socket, vdpa);
        let vfs =
            pool.config.vfs.iter().map(|vf| {
                (pool.vf_subject(vf.index), Function { nic, vf: Some(vf.index) }, &vf.vhost_socket, &vf.vdpa)
            });
        for (subject, function, socket, vdpa) in std::iter::once(pf).chain(vfs) {
            let device = if pool.option == VdpaConfig::OPTION { "path" } else { "vdpa" };
            let paths = [("socket", socket, "this socket"), (device, vdpa, "this device")];
            for (key, path, what) in paths.into_iter().filter_map(|(key, path, what)| Some((key, path.as_ref()?, what)))
            {
                claims.claim(path.clone(), function).map_err(|user| {
                    let remedy = "give each NIC and each VF its own";
                    in_use(subject.key(key, path.display()), what.to_string(), user, remedy)
                })?;
            }
        }
    }
    Ok(())
}
