// What the bindings do in Swift, without an app: check BUNDLE PROMPT. The text goes to standard output, as `anec run` writes it.

import Anec
import Foundation

func require(_ holds: Bool, _ what: String) {
    if !holds {
        FileHandle.standardError.write(Data("check: \(what)\n".utf8))
        exit(1)
    }
}

let (bundle, prompt) = (CommandLine.arguments[1], CommandLine.arguments[2])
let options = TextOptions(maxTokens: 40)
do {
    _ = try AnecModel.open(path: bundle + "/nothing")
    require(false, "a folder without a bundle was opened")
} catch AnecError.NoBundle(let message, let help) {
    require(message.contains("no bundle here") && !help.isEmpty, message)
}
let model = try AnecModel.open(path: bundle, units: .executor)
require(model.info().task == "text_generation" && model.prewarmEstimate() == nil, "the bundle's description")
try await model.prewarm { require((0...1).contains($0), "a share") }

let session = model.session()
var pieces: [String] = []
for try await piece in session.stream(prompt: prompt, options: options) { pieces.append(piece) }
require(pieces.count > 5, "the text comes in pieces")

// who leaves the loop cancels the text: the session is free for the next, which is the same
for try await _ in session.stream(prompt: prompt, options: TextOptions(maxTokens: 4000)) { break }
let again = try session.generate(prompt: prompt, options: options)
require(again.text == pieces.joined() && again.cachedTokens > 0, "the same text again")
do {
    _ = try model.embed(texts: ["a"])
    require(false, "a decoder gave a vector")
} catch AnecError.OtherTask {}
print(again.text)
