//! The rules for the socket device, and its plan.

use virtio_devices::VsockSpec;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::virtio::vsock::VsockConfig;

use crate::config::common_keys::CommonKeys;
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

const FLAG: &str = "--vsock";
/// The longest path of a Unix socket in bytes (`unix(7)`).
const MAX_PATH: usize = 107;

/// Plans the socket device, if there is one.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn plan(config: Option<&VsockConfig>, ids: Vec<String>) -> Result<Option<DevicePlan>, ConfigError> {
    let (Some(config), Some(id)) = (config, ids.into_iter().next()) else { return Ok(None) };
    let subject = Subject::device(FLAG, config.id.as_deref(), 0, 1);
    let keys = CommonKeys { id: config.id.as_deref(), slot: (config.pci_segment, config.pci_device_id) };
    keys.check(FLAG, &subject)?;
    let wrong =
        |key: &str, value: String, what: String| Err(ConfigError::new(subject.key(key, value), Problem::Value(what)));
    // Any, local, the host, and any again (`virtio 1.4 §5.10.4`).
    if matches!(config.cid, 0..=2 | u32::MAX) {
        let what = "not a guest's context ID; give one from 3 to 4294967294".to_string();
        return wrong("cid", config.cid.to_string(), what);
    }
    let path = config.socket.display().to_string();
    match config.socket.as_os_str().len() {
        0 => return wrong("socket", path, "the path is empty; give that of a Unix socket to be made".to_string()),
        len if len > MAX_PATH => {
            return wrong("socket", path, format!("{len} bytes; a socket's path has at most {MAX_PATH}, shorten it"));
        }
        _ => {}
    }
    let spec = VsockSpec { id: id.clone(), cid: config.cid, socket: config.socket.clone() };
    let VsockConfig { pci_segment, pci_device_id, .. } = *config;
    Ok(Some(DevicePlan {
        flag: FLAG,
        id,
        pci_segment,
        pci_device_id,
        iommu: config.iommu,
        kind: DeviceKind::Vsock(spec),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(text: &str) -> Result<DevicePlan, String> {
        let planned = text.parse::<VsockConfig>().and_then(|config| {
            let id = config.id.clone().unwrap_or_else(|| "_vsock0".to_string());
            plan(Some(&config), vec![id])
        });
        planned.map(Option::unwrap).map_err(|error| error.to_string())
    }

    #[test]
    fn a_socket_device_has_a_context_id_and_a_socket() {
        let vsock = |id: &str, cid, pci_segment, pci_device_id| DevicePlan {
            flag: "--vsock",
            id: id.to_string(),
            pci_segment,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Vsock(VsockSpec { id: id.to_string(), cid, socket: "/run/v".into() }),
        };
        assert_eq!(planned("cid=3,socket=/run/v").unwrap(), vsock("_vsock0", 3, 0, None));
        let text = "cid=4294967294,socket=/run/v,id=v,pci_device_id=5,iommu=off,pci_segment=1";
        assert_eq!(planned(text).unwrap(), vsock("v", u32::MAX - 1, 1, Some(5)));
        assert_eq!(plan(None, Vec::new()), Ok(None));
    }

    #[test]
    fn an_impossible_vsock_is_refused_with_a_way_out() {
        for cid in [0, 1, 2, u32::MAX] {
            let said = planned(&format!("cid={cid},socket=/run/v")).unwrap_err();
            assert_eq!(said, format!("--vsock cid={cid}: not a guest's context ID; give one from 3 to 4294967294"));
        }
        let long = "v".repeat(108);
        for (text, expected) in [
            ("socket=/run/v", "--vsock: cid is required; add it".to_string()),
            ("cid=3", "--vsock: socket is required; add it".to_string()),
            ("cid=3,socket=", "--vsock: socket is required; add it".to_string()),
            (
                &format!("cid=3,id=v,socket={long}"),
                format!("--vsock id=v,socket={long}: 108 bytes; a socket's path has at most 107, shorten it"),
            ),
        ] {
            let said = planned(text).unwrap_err();
            assert!(said.starts_with(&expected), "{said}");
        }
        let config: VsockConfig = serde_json::from_str(r#"{"cid": 3, "socket": ""}"#).unwrap();
        assert_eq!(
            plan(Some(&config), vec!["v".to_string()]).unwrap_err().to_string(),
            "--vsock socket=: the path is empty; give that of a Unix socket to be made"
        );
    }
}
