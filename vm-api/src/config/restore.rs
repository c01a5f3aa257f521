//! Source of a restored VM, and differences from its saved state: `vm.restore` and `--restore`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::grammar::{list, pairs, quote, unquote};
use crate::config::memory::zone_update::ZoneUpdate;
use crate::config::value::Value;

/// Source of a restored VM, and differences on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--restore")]
pub struct RestoreConfig {
    /// Folder of the snapshot, such as file:///var/lib/vm/snapshot.
    #[option("source_url=<url>", bare, required)]
    pub source_url: String,
    /// Allocate all of the guest's memory before it runs. Only with copy.
    #[option("prefault=on|off")]
    pub prefault: bool,
    /// Restore of memory. copy: read before the guest runs; ondemand: read as the guest uses it; map: the file mapped
    /// privately, which must then stay unchanged; auto: map if that is safe, otherwise copy.
    #[option("memory_restore_mode=copy|ondemand|map|auto", default = MemoryRestoreMode::Copy)]
    pub memory_restore_mode: MemoryRestoreMode,
    /// Descriptors of open taps, for each NIC that used descriptors: its id, or its id, a slash and the index of a VF.
    #[option("net_fds=[<id>@[<fd>,...],...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Taps of NICs and VFs that used descriptors.")]
    pub net_fds: Vec<RestoredNet>,
    /// Backends that replace those of the snapshot, each for the NIC with this id, or a VF of it: tap=<interface>,
    /// fd=[<fd>,...], socket=<path>, vdpa=<path>, or link=down for none until vm.set-vf gives one.
    #[option("backends=[<id>[/<VF>]@<key>=<value>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Backends that replace those of the snapshot.")]
    pub backends: Vec<RestoredBackend>,
    /// Memory zones whose memory comes from other NUMA nodes of this host than the saved ones.
    #[option("zone_updates=[<zone>@<node>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zone_updates: Vec<ZoneUpdate>,
    /// Action if the backend of a NIC, PF or VF cannot be opened. refuse: restore nothing. link-down: restore it with
    /// its link down; a backend can be given later (vm.set-vf).
    #[option("on_missing_backend=refuse|link-down", default = OnMissingBackend::Refuse)]
    pub on_missing_backend: OnMissingBackend,
    /// Resume the guest at once.
    #[option("resume=on|off")]
    pub resume: bool,
}

/// Method of restoring a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum MemoryRestoreMode {
    /// Read before the guest runs.
    #[default]
    Copy,
    /// Read as the guest uses it (userfaultfd).
    OnDemand,
    /// A private mapping of the snapshot's file.
    Map,
    /// `Map` if that is safe, otherwise `Copy`.
    Auto,
}

impl MemoryRestoreMode {
    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::OnDemand => "ondemand",
            Self::Map => "map",
            Self::Auto => "auto",
        }
    }
}

impl Value for MemoryRestoreMode {
    fn parse(text: &str) -> Result<Self, String> {
        let modes = [Self::Copy, Self::OnDemand, Self::Map, Self::Auto];
        let mode = modes.into_iter().find(|mode| mode.name().eq_ignore_ascii_case(text));
        mode.ok_or_else(|| "give copy, ondemand, map or auto".to_string())
    }

    fn print(&self) -> Option<String> {
        Some(self.name().to_string())
    }
}

/// Action for a NIC, PF or VF whose backend cannot be opened, or cannot report its writes while the VM is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
pub enum OnMissingBackend {
    /// An error.
    #[default]
    Refuse,
    /// Set the link down.
    LinkDown,
}

impl Value for OnMissingBackend {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "refuse" => Ok(Self::Refuse),
            "link-down" => Ok(Self::LinkDown),
            _ => Err("give refuse or link-down".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Refuse => "refuse".to_string(),
            Self::LinkDown => "link-down".to_string(),
        })
    }
}

/// Descriptors of taps for a NIC, or for a VF of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "RestoredNetConfig")]
pub struct RestoredNet {
    /// The NIC's id.
    pub id: String,
    /// Index of its VF; without one, the NIC's own function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
    /// Number of descriptors passed, one for each pair of queues.
    pub num_fds: usize,
    /// The descriptors: numbers on the command line; the API passes them with the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Without effect: descriptors come with the request.")]
    pub fds: Vec<i32>,
}

/// A backend that replaces that of the snapshot. Exactly one kind is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "RestoredBackendConfig")]
pub struct RestoredBackend {
    /// The NIC's id.
    pub id: String,
    /// Index of its VF; without one, the NIC's own function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
    /// A tap of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Number of tap descriptors passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_fds: Option<usize>,
    /// Descriptors of taps: numbers on the command line; the API passes them with the request, after those of
    /// `net_fds`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(about = "Without effect: descriptors come with the request, after those of net_fds.")]
    pub fds: Vec<i32>,
    /// The socket of a vhost-user backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// A vDPA device of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
    /// No backend for now: the link is down until vm.set-vf gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<NoLink>,
}

/// The link of a VF without a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
pub enum NoLink {
    /// Down.
    Down,
}

/// Parses a NIC and an optional VF: `pf0` or `pf0/3`.
fn function(text: &str) -> Result<(String, Option<u16>), String> {
    let text = unquote(text)?;
    match text.rsplit_once('/') {
        Some((id, vf)) => Ok((id.to_string(), Some(u16::parse(vf)?))),
        None => Ok((text, None)),
    }
}

fn name(id: &str, vf: Option<u16>) -> String {
    let name = vf.map_or_else(|| id.to_string(), |vf| format!("{id}/{vf}"));
    quote(&name)
}

fn numbers(fds: &[i32]) -> String {
    let fds: Vec<_> = fds.iter().map(i32::to_string).collect();
    format!("[{}]", fds.join(","))
}

impl Value for Vec<RestoredNet> {
    fn parse(text: &str) -> Result<Self, String> {
        let element = |element: &String| {
            let wrong = || "write each as net0@[3,4]: the id, @, its descriptors".to_string();
            let (function_name, fds) = element.split_once('@').ok_or_else(wrong)?;
            let (id, vf) = function(function_name)?;
            let fds = Vec::<i32>::parse(fds)?;
            Ok(RestoredNet { id, vf, num_fds: fds.len(), fds })
        };
        list(text)?.iter().map(element).collect()
    }

    fn print(&self) -> Option<String> {
        let one = |net: &RestoredNet| format!("{}@{}", name(&net.id, net.vf), numbers(&net.fds));
        let all: Vec<_> = self.iter().map(one).collect();
        (!all.is_empty()).then(|| format!("[{}]", all.join(",")))
    }
}

impl Value for Vec<RestoredBackend> {
    fn parse(text: &str) -> Result<Self, String> {
        list(text)?.iter().map(|element| backend(element)).collect()
    }

    fn print(&self) -> Option<String> {
        let all: Vec<_> = self.iter().map(RestoredBackend::to_text).collect();
        (!all.is_empty()).then(|| format!("[{}]", all.join(",")))
    }
}

/// Reads `pf0/3@tap=t`.
fn backend(text: &str) -> Result<RestoredBackend, String> {
    let wrong = || "write each as pf0/3@tap=<interface>, @fd=[<fd>], @socket=<path>, @vdpa=<path> or @link=down";
    let (function_name, kind) = text.split_once('@').ok_or_else(wrong)?;
    let (id, vf) = function(function_name)?;
    let pairs = pairs(kind)?;
    let [pair] = &pairs[..] else { return Err(wrong().to_string()) };
    let value = pair.value.as_deref().ok_or_else(wrong)?;
    let text = || unquote(value);
    let mut backend = RestoredBackend { id, vf, ..RestoredBackend::default() };
    match pair.key.as_str() {
        "tap" => backend.tap = Some(text()?),
        "fd" => {
            backend.fds = Vec::<i32>::parse(value)?;
            backend.num_fds = Some(backend.fds.len());
        }
        "socket" => backend.vhost_socket = Some(text()?.into()),
        "vdpa" => backend.vdpa = Some(text()?.into()),
        "link" if value == "down" => backend.link = Some(NoLink::Down),
        _ => return Err(wrong().to_string()),
    }
    Ok(backend)
}

impl RestoredBackend {
    fn to_text(&self) -> String {
        let Self { id, vf, tap, num_fds: _, fds, vhost_socket, vdpa, link } = self;
        let path = |key: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| format!("{key}={}", quote(&path.to_string_lossy())))
        };
        let kinds = [
            tap.as_ref().map(|tap| format!("tap={}", quote(tap))),
            (!fds.is_empty()).then(|| format!("fd={}", numbers(fds))),
            path("socket", vhost_socket),
            path("vdpa", vdpa),
            link.map(|NoLink::Down| "link=down".to_string()),
        ];
        let kinds: Vec<_> = kinds.into_iter().flatten().collect();
        format!("{}@{}", name(id, *vf), kinds.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> RestoreConfig {
        text.parse().unwrap()
    }

    #[test]
    fn defaults_of_a_restore_are_those_of_cloud_hypervisor() {
        let config = read("source_url=file:///s");
        assert_eq!(
            (config.prefault, config.resume, config.memory_restore_mode),
            (false, false, MemoryRestoreMode::Copy)
        );
        assert_eq!(config, serde_json::from_str(r#"{"source_url": "file:///s"}"#).unwrap());
        assert!("prefault=on".parse::<RestoreConfig>().is_err());
    }

    #[test]
    fn each_mode_has_a_word_on_the_command_line_and_in_json() {
        for (text, json, mode) in [
            ("copy", "Copy", MemoryRestoreMode::Copy),
            ("ondemand", "OnDemand", MemoryRestoreMode::OnDemand),
            ("map", "Map", MemoryRestoreMode::Map),
            ("auto", "Auto", MemoryRestoreMode::Auto),
        ] {
            assert_eq!(read(&format!("source_url=u,memory_restore_mode={text}")).memory_restore_mode, mode);
            assert_eq!(serde_json::to_value(mode).unwrap(), json);
        }
    }

    #[test]
    fn descriptors_and_backends_read_back_as_they_are_written() {
        let text = "source_url=file:///s,prefault=on,memory_restore_mode=auto,net_fds=[a@[3,4],pf0/2@[5]],\
                    backends=[pf0/0@tap=t,pf0/1@fd=[7],pf0/3@socket=/s,pf0/4@vdpa=/dev/v,pf0/5@link=down],\
                    zone_updates=[mem0@1],on_missing_backend=link-down,resume=on";
        let config = read(text);
        assert_eq!((config.to_string().as_str(), read(&config.to_string())), (text, config.clone()));
        assert_eq!(config.net_fds[1], RestoredNet { id: "pf0".into(), vf: Some(2), num_fds: 1, fds: vec![5] });
        assert_eq!((config.backends[0].tap.as_deref(), config.backends[4].link), (Some("t"), Some(NoLink::Down)));
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!(serde_json::from_value::<RestoreConfig>(json).unwrap(), config);
    }

    #[test]
    fn a_restored_nic_without_function_or_backend_is_refused() {
        for keys in
            ["net_fds=[a]", "net_fds=[a/x@[3]]", "backends=[a]", "backends=[a@colour=red]", "backends=[a@link=up]"]
        {
            assert!(format!("source_url=u,{keys}").parse::<RestoreConfig>().is_err(), "{keys}");
        }
    }
}
