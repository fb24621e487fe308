//! A test of the configuration that NCCL gets.
//!
//! A value that the caller leaves open stays NCCL's choice.

use super::*;

#[test]
fn nccl_chooses_blocks_unless_it_is_told_how_many() {
    let taken = |ctas| {
        let config = config(ctas);
        [config.maxCTAs, config.CTAPolicy, config.nvlsCTAs]
    };
    assert_eq!(taken(Ctas::default()), [UNDEFINED; 3]);
    assert_eq!(taken(Ctas { most: Some(8), efficient: true, nvls: Some(4) }), [8, EFFICIENT, 4]);
}
