//! The rules for persistent memory, and its plan.

use virtio_devices::PmemSpec;
use vm_api::config::bytes;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::virtio::pmem::PmemConfig;

use crate::config::common_keys::{CommonKeys, check_ids};
use crate::config::device::{DeviceKind, DevicePlan};
use crate::config::subject::Subject;

const FLAG: &str = "--pmem";

/// Plans all persistent memory.
///
/// # Errors
///
/// Fails with the first mistake. Sizes of files are checked when these are opened.
pub(crate) fn plan(all: &[PmemConfig], ids: Vec<String>) -> Result<Vec<DevicePlan>, ConfigError> {
    let mut plans = Vec::with_capacity(all.len());
    for (index, (pmem, id)) in all.iter().zip(ids).enumerate() {
        check(pmem, &Subject::device(FLAG, pmem.id.as_deref(), index, all.len()))?;
        let PmemConfig { size, discard_writes, pci_segment, pci_device_id, .. } = *pmem;
        let spec = PmemSpec { id: id.clone(), file: pmem.file.clone(), size, discard_writes };
        plans.push(DevicePlan {
            flag: FLAG,
            id,
            pci_segment,
            pci_device_id,
            iommu: pmem.iommu,
            kind: DeviceKind::Pmem(spec),
        });
    }
    check_ids(FLAG, &plans)?;
    Ok(plans)
}

fn check(pmem: &PmemConfig, subject: &Subject) -> Result<(), ConfigError> {
    let keys = CommonKeys { id: pmem.id.as_deref(), slot: (pmem.pci_segment, pmem.pci_device_id) };
    keys.check(FLAG, subject)?;
    if pmem.file.as_os_str().is_empty() {
        let what = "the path is empty; give a file, a block device, or a folder with size=".to_string();
        return Err(ConfigError::new(subject.key("file", ""), Problem::Value(what)));
    }
    let Some(size) = pmem.size else { return Ok(()) };
    let fail = |problem| Err(ConfigError::new(subject.key("size", bytes(size)), problem));
    if size == 0 || !size.is_multiple_of(PmemSpec::UNIT) {
        return fail(Problem::Value("not a multiple of 2M above 0; round it up".to_string()));
    }
    if size > PmemSpec::MOST {
        return fail(Problem::Limit(format!("more than a guest can address; give at most {}", bytes(PmemSpec::MOST))));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(all: &[PmemConfig]) -> Vec<String> {
        vm_api::config::VmConfig { pmem: all.to_vec(), ..vm_api::config::VmConfig::default() }.ids().of::<PmemConfig>()
    }

    fn planned(all: &[&str]) -> Result<Vec<DevicePlan>, String> {
        let all: Result<Vec<PmemConfig>, _> = all.iter().map(|text| text.parse()).collect();
        all.and_then(|all| plan(&all, ids(&all))).map_err(|error| error.to_string())
    }

    #[test]
    fn persistent_memory_is_a_file_or_a_part_of_it() {
        let pmem = |id: &str, size, discard_writes, pci_segment, pci_device_id| DevicePlan {
            flag: "--pmem",
            id: id.to_string(),
            pci_segment,
            pci_device_id,
            iommu: false,
            kind: DeviceKind::Pmem(PmemSpec { id: id.to_string(), file: "/f".into(), size, discard_writes }),
        };
        let plans =
            planned(&["file=/f", "file=/f,size=4M,discard_writes=on,iommu=off,pci_segment=1,pci_device_id=5,id=p"]);
        let expected = [pmem("_pmem0", None, false, 0, None), pmem("p", Some(4 << 20), true, 1, Some(5))];
        assert_eq!(plans.unwrap(), expected);
        assert_eq!(planned(&[]), Ok(Vec::new()));
    }

    #[test]
    fn an_impossible_pmem_is_refused_with_a_way_out() {
        let unit = "not a multiple of 2M above 0; round it up";
        for (all, expected) in [
            (&["size=2M"][..], "--pmem: file is required; add it".to_string()),
            (&["file=/f,size=0"], format!("--pmem size=0: {unit}")),
            (&["file=/f,size=3M"], format!("--pmem size=3M: {unit}")),
            (&["file=/f", "file=/g,size=4097"], format!("--pmem number 2, size=4097: {unit}")),
            (
                &["file=/f,size=32769G"],
                "--pmem size=32769G: more than a guest can address; give at most 32768G".to_string(),
            ),
            (
                &["file=/f,id=x", "file=/g,id=x"],
                "--pmem id=x: this id is already in use by another device; give each device its own".to_string(),
            ),
        ] {
            assert_eq!(planned(all).unwrap_err(), expected);
        }
    }
}
