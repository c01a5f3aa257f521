//! The PCI segments: how many there are, what each gets of the addresses, and which devices may be on them.

use vm_api::config::VmConfig;
use vm_api::config::error::{ConfigError, Problem};

use crate::arch::x86_64::layout::{MOST_SEGMENTS, last_bus};
use crate::pci_layout::Weights;

/// The weights of each segment, by number.
///
/// # Errors
///
/// The first thing that is wrong.
pub(crate) fn plan(config: &VmConfig) -> Result<Vec<Weights>, ConfigError> {
    let segments = config.platform.as_ref().map_or(1, |platform| platform.num_pci_segments);
    if !(1..=MOST_SEGMENTS).contains(&segments) {
        let what = format!("a VM has 1 to {MOST_SEGMENTS} PCI segments; give one of these numbers");
        return Err(ConfigError::new(format!("--platform num_pci_segments={segments}"), Problem::Limit(what)));
    }
    let mut weights = vec![None; usize::from(segments)];
    for given in &config.pci_segments {
        let segment = given.pci_segment;
        let fail = |key: String, problem| Err(ConfigError::new(format!("--pci-segment {key}"), problem));
        match weights.get_mut(usize::from(segment)) {
            None => return fail(format!("pci_segment={segment}"), no_such_segment(segments)),
            Some(Some(_)) => {
                let what = "this segment is given twice; put all its keys into one".to_string();
                return fail(format!("pci_segment={segment}"), Problem::Conflict(what));
            }
            Some(place) => {
                let (mem32, mem64) = (given.mmio32_aperture_weight, given.mmio64_aperture_weight);
                *place = Some(Weights { mem32, mem64 });
            }
        }
        let weights = [
            ("mmio32_aperture_weight", given.mmio32_aperture_weight),
            ("mmio64_aperture_weight", given.mmio64_aperture_weight),
        ];
        if let Some((key, _)) = weights.into_iter().find(|(_, weight)| *weight == 0) {
            let what = "a segment without addresses is of no use; give 1 or more".to_string();
            return fail(format!("pci_segment={segment},{key}=0"), Problem::Value(what));
        }
    }
    Ok(weights.into_iter().map(|weights| weights.unwrap_or(Weights { mem32: 1, mem64: 1 })).collect())
}

/// Checks that a device with `total_vfs` VFs can be on the segment `pci_segment` of a VM with `segments` of them.
/// `option` names the device, up to where a further key goes.
///
/// # Errors
///
/// There is no such segment, or it has no bus for VFs.
pub(crate) fn check(
    option: impl FnOnce(&str, u16) -> String,
    pci_segment: u16,
    total_vfs: u16,
    segments: u16,
) -> Result<(), ConfigError> {
    let problem = if pci_segment >= segments {
        no_such_segment(segments)
    } else if total_vfs > 0 && last_bus(pci_segment) == 0 {
        let what = format!(
            "segment {pci_segment} has bus 0 alone, and VFs need buses of their own (sriov_vfs={total_vfs}); put the \
             PF on segment 0"
        );
        Problem::Conflict(what)
    } else {
        return Ok(());
    };
    Err(ConfigError::new(option("pci_segment", pci_segment), problem))
}

fn no_such_segment(segments: u16) -> Problem {
    Problem::Value(match segments.saturating_sub(1) {
        0 => "the VM has PCI segment 0 alone; leave pci_segment out, or add --platform num_pci_segments=2".to_string(),
        last => format!("the VM has PCI segments 0 to {last}; give one of them, or more with --platform"),
    })
}
