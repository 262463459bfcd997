use super::*;

#[test]
fn messages_are_read_as_the_api_has_them() {
    let read = |json: Json| serde_json::from_value::<Message>(json);
    let parts = serde_json::json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let message = read(serde_json::json!({"role": "user", "content": parts})).unwrap();
    assert_eq!(message, Message::new("user", "ab"));
    let call = serde_json::json!({"role": "assistant", "content": null, "tool_calls": []});
    assert_eq!(read(call.clone()).unwrap().content, None);
    assert_eq!(serde_json::to_value(read(call.clone()).unwrap()).unwrap(), call);
    let image = serde_json::json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    assert!(read(image).unwrap_err().to_string().contains("only text is understood"));
    assert!(read(serde_json::json!({"content": "x"})).is_err(), "somebody must speak");
}

#[test]
fn tools_and_variables_reach_the_template() {
    let source = "{% if tools %}{{ tools[0].function.name }} {% endif %}\
        {% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }} {{ c.function.arguments | tojson }}\
        {% endfor %}{{ m.content or '' }}{% endfor %}{% if enable_thinking %} think{% endif %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let mut chat: Chat = Chat::new(vec![Message::new("user", "hi ")]);
    assert_eq!(template.render(&chat).unwrap(), "hi ");
    let call = serde_json::json!({
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Köln\"}"}}],
    });
    chat.messages.push(serde_json::from_value(call).unwrap());
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "weather"}}));
    chat.variables.insert("enable_thinking".into(), Json::Bool(true));
    assert_eq!(template.render(&chat).unwrap(), "weather hi Köln {\"city\": \"Köln\"} think");
    assert!(template.takes_tools());
}

#[test]
fn some_templates_expect_tools_in_the_systems_message() {
    let source = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\
        {% if message['role'] == 'system' and message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let mut chat = Chat::new(vec![Message::new("user", "hi")]);
    assert_eq!(template.render(&chat).unwrap(), "<|user|>hi");
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "f"}}));
    assert_eq!(template.render(&chat).unwrap(), "<|system|><|tool|>[{\"name\":\"f\"}]<|/tool|><|user|>hi");
    chat.messages.insert(0, Message::new("system", "Be kind."));
    assert_eq!(template.render(&chat).unwrap(), "<|system|>Be kind.<|tool|>[{\"name\":\"f\"}]<|/tool|><|user|>hi");
    let plain = "{% for message in messages %}{{ message.content }}{% endfor %}";
    assert!(!ChatTemplate::new(plain, "", "").unwrap().takes_tools());
}

#[test]
fn developers_speak_as_the_system_where_the_template_knows_no_such_role() {
    let chat = Chat::new(vec![Message::new("developer", "Be kind."), Message::new("user", "hi")]);
    let branches = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let raising = branches.replace("{% endif %}", "{% else %}{{ raise_exception('unknown role') }}{% endif %}");
    for source in [branches, &raising] {
        assert_eq!(ChatTemplate::new(source, "", "").unwrap().render(&chat).unwrap(), "[Be kind.]hi");
    }
    let own = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    assert_eq!(ChatTemplate::new(own, "", "").unwrap().render(&chat).unwrap(), "developer:Be kind.;user:hi;");
}

#[test]
fn no_message_is_left_out_silently() {
    let template = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content | upper }}{% endfor %}";
    let template = ChatTemplate::new(template, "", "").unwrap();
    let render = |messages: &[(&str, &str)]| {
        template.render(&Chat::new(messages.iter().map(|(role, text)| Message::new(role, text)).collect()))
    };
    assert_eq!(render(&[("user", "hi")]).unwrap(), "HI", "a text that is rewritten isn't left out");
    for role in ["system", "tool", "critic", "developer"] {
        let error = render(&[("user", "hi"), (role, "text"), ("user", "x")]).unwrap_err().to_string();
        let named = if role == "developer" { "system" } else { role };
        assert!(error.contains("leaves out message 2") && error.contains(&format!("`{named}`")), "{error}");
    }
    let think = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}";
    let chat = Chat::new(vec![Message::new("assistant", "<think>a</think>b"), Message::new("user", "c")]);
    assert_eq!(ChatTemplate::new(think, "", "").unwrap().render(&chat).unwrap(), "bc");
}

#[test]
fn the_last_message_can_be_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let mut chat = Chat::new(vec![Message::new("user", "hi"), Message::new("assistant", " It is ")]);
    chat.continues_last = true;
    assert_eq!(template.render(&chat).unwrap(), "<user>hi<end><assistant>It is");
    let untrimmed = ChatTemplate::new(&source.replace(" | trim", ""), "", "").unwrap();
    assert_eq!(untrimmed.render(&chat).unwrap(), "<user>hi<end><assistant> It is ");
    let changed = ChatTemplate::new(&source.replace("trim", "upper"), "", "").unwrap();
    assert!(changed.render(&chat).unwrap_err().to_string().contains("changes the last message"));
}

#[test]
fn tools_are_found_by_what_a_template_writes() {
    let takes = |source: &str| ChatTemplate::new(source, "", "").unwrap().takes_tools();
    assert!(takes("{% set tools = tools or [] %}{% for t in tools %}{{ t.function.name }}{% endfor %}"));
    assert!(takes("{% if messages[0].role == 'system' and tools %}{{ tools|tojson }}{% endif %}"));
    assert!(!takes("{% set tools = tools or [] %}{{ messages[-1].content }}"), "a mention is no use");
}

#[test]
fn long_messages_are_refused_before_they_are_rendered() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json");
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}", "", "").unwrap();
    let chat = Chat::new(vec![Message::new("user", &"a".repeat(1 << 20))]);
    let error = template.encode_within(&tokenizer, &chat, 64).unwrap_err();
    assert!(matches!(error, RuntimeError::TextTooLong { .. }), "{error}");
}
