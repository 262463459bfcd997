//! Rows of the catalogue, by group (see [`catalogue`](super::catalogue) for their syntax).

mod constexpr;
mod control;
mod convolution;
pub mod element_types;
mod elementwise;
mod image;
mod indexing;
mod matrix;
mod normalization;
mod recurrent;
mod reduction;
mod rules;
mod shape;
mod slicing;
mod state;
#[cfg(test)]
mod tests;

use super::catalogue::Row;

/// Returns all rows.
pub fn rows() -> Vec<Row> {
    let groups: [&[Row]; 13] = [
        elementwise::ROWS,
        reduction::ROWS,
        matrix::ROWS,
        convolution::ROWS,
        normalization::ROWS,
        shape::ROWS,
        image::ROWS,
        slicing::ROWS,
        indexing::ROWS,
        state::ROWS,
        control::ROWS,
        recurrent::ROWS,
        constexpr::ROWS,
    ];
    groups.concat()
}
