//! Contents of the flash (`NVM Map`), most of which is erased.
//!
//! The permanent address is not in them: the NIC's configuration sets it.

use crate::model::Model;

/// Word of the software checksum.
const CHECKSUM: u16 = 0x3f;
/// Sum of all covered words.
const SUM: u16 = 0xbaba;
/// Word at which the printed board assembly number begins.
const PBA: u16 = 0x60;
/// Words of the PBA block: its length, and five with two characters each.
const PBA_WORDS: [u16; 6] = [6, 0x4330, 0x3535, 0x302d, 0x3030, 0x3030];

/// Reads a word.
pub(crate) fn word(model: Model, address: u16) -> u16 {
    match address {
        // The PBA number is a string, and where.
        0x15 => 0xfafa,
        0x16 => PBA,
        // Device capabilities.
        0x2c => 0,
        // ETrack ID, which is valid with the upper bit.
        0x2d => 1,
        0x2e => 0x8000,
        CHECKSUM => {
            let covered = (0..=model.last_checked_word()).filter(|at| *at != CHECKSUM);
            covered.map(|at| word(model, at)).fold(SUM, u16::wrapping_sub)
        }
        _ => address.checked_sub(PBA).and_then(|n| PBA_WORDS.get(usize::from(n)).copied()).unwrap_or(0xffff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_covered_words_have_their_sum() {
        for (model, last) in [(Model::X550, 0x41), (Model::X540, 0x3e)] {
            let covered = (0..=last).filter(|at| *at != CHECKSUM).chain([CHECKSUM]);
            assert_eq!(covered.map(|at| word(model, at)).fold(0, u16::wrapping_add), 0xbaba, "{model}");
        }
    }

    #[test]
    fn pointers_to_absent_sections_are_erased() {
        assert!(
            (0x02..=0x0e)
                .chain([0x17, 0x1b, 0x27, 0x28, 0x42, 0x5f, 0x66, 0xffff])
                .all(|at| word(Model::X550, at) == 0xffff)
        );
    }

    #[test]
    fn the_board_number_is_text_behind_its_length() {
        assert_eq!(([0x15, 0x16, PBA].map(|at| word(Model::X550, at))), [0xfafa, PBA, 6]);
        let text: Vec<u8> = (PBA + 1..PBA + 6).flat_map(|at| word(Model::X550, at).to_be_bytes()).collect();
        assert_eq!(text, b"C0550-0000");
    }
}
